import pickle

import cloudpickle

import monarch
import monarch.actor


def test_every_public_name_exists_and_the_list_is_sorted():
    assert sorted(monarch.actor.__all__) == list(monarch.actor.__all__)
    assert not [n for n in monarch.actor.__all__ if not hasattr(monarch.actor, n)]


def test_a_function_that_names_the_package_can_be_sent():
    assert cloudpickle.loads(cloudpickle.dumps(lambda: monarch))() is monarch
    assert pickle.loads(pickle.dumps(monarch)) is monarch
