import monarch.actor


def test_every_public_name_exists_and_the_list_is_sorted():
    assert sorted(monarch.actor.__all__) == list(monarch.actor.__all__)
    assert not [n for n in monarch.actor.__all__ if not hasattr(monarch.actor, n)]
