"""The table of configuration keys. Docs, environment names, types and checks all come from here."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from monarch.config import durations
from monarch.config.transport import BindSpec, ChannelTransport


class Encoding(enum.Enum):
    """Wire encodings that existing programs may name. Ours is always multipart."""

    Bincode = "serde_bincode"
    Json = "serde_json"
    Multipart = "serde_multipart"


class Key(NamedTuple):
    """One key. `kind`: d duration, i integer, b boolean, f float, s text, t transport, e encoding; `?`: or None."""

    name: str
    kind: str
    default: Any
    env: str
    meaning: str = ""
    positive: bool = False
    local: bool = False  #: not passed on to other processes


def _rows() -> list[Key]:
    h = "HYPERACTOR_"
    rows = [
        Key("default_transport", "t", BindSpec(ChannelTransport.Unix), h + "MESH_DEFAULT_TRANSPORT", "transport"),
        Key("enable_log_forwarding", "b", False, h + "MESH_ENABLE_LOG_FORWARDING", "send output to the client"),
        Key("enable_file_capture", "b", False, h + "MESH_ENABLE_FILE_CAPTURE", "keep output in files"),
        Key("tail_log_lines", "i", 0, h + "MESH_TAIL_LOG_LINES", "last lines kept for failure reports"),
        Key("codec_max_frame_length", "i", 10 << 30, h + "CODEC_MAX_FRAME_LENGTH", "largest message, bytes", True),
        Key("default_encoding", "e", Encoding.Multipart, h + "DEFAULT_ENCODING", "wire encoding (compatibility)"),
        Key("message_latency_sampling_rate", "f", 0.01, h + "MESSAGE_LATENCY_SAMPLING_RATE", "telemetry sampling"),
        Key("host_spawn_ready_timeout", "d", 30.0, h + "HOST_SPAWN_READY_TIMEOUT", "process start; 0 is no limit"),
        Key("mesh_orphan_timeout", "d?", 60.0, h + "MESH_ORPHAN_TIMEOUT", "lease of owned resources"),
        Key("mesh_attach_config_timeout", "d", 60.0, h + "MESH_ATTACH_CONFIG_TIMEOUT", "attaching to a worker"),
        Key("mesh_bootstrap_enable_pdeathsig", "b", True, h + "MESH_BOOTSTRAP_ENABLE_PDEATHSIG", "die with the host"),
        Key("channel_tcp_congestion", "s", "", h + "CHANNEL_TCP_CONGESTION", "TCP congestion control"),
        Key("proc_launcher_kind", "s", "", h + "MESH_PROC_LAUNCHER_KIND", "how processes are started"),
        Key("mesh_admin_addr", "s", "[::]:1729", h + "MESH_ADMIN_ADDR", "admin service address"),
        Key("pyspy_bin", "s", "", "PYSPY_BIN", "path of py-spy"),
        Key("hyperactor_tls_cert", "s", "/etc/hyperactor/tls/tls.crt", h + "TLS_CERT", "certificate", local=True),
        Key("hyperactor_tls_key", "s", "/etc/hyperactor/tls/tls.key", h + "TLS_KEY", "private key", local=True),
        Key("hyperactor_tls_ca", "s", "/etc/hyperactor/tls/ca.crt", h + "TLS_CA", "authority", local=True),
        Key("auth_key", "s", "", "MONARCH_AUTH_KEY", "secret that hosts must prove to know", local=True),
        Key("auth_key_file", "s", "", "MONARCH_AUTH_KEY_FILE", "file with that secret", local=True),
        Key("channel_refused_timeout", "d", 1.0, h + "CHANNEL_REFUSED_TIMEOUT", "lost when refused for that long"),
        Key("trust_remote_connections", "b", False, "MONARCH_TRUST_REMOTE_CONNECTIONS", "no authentication at all"),
        Key("file_log_level", "s", "", "MONARCH_FILE_LOG", "level of the internal log"),
        Key("monarch_log_suffix", "s", "", "MONARCH_LOG_SUFFIX", "suffix of the internal log's name"),
        Key("tokio_worker_threads", "i?", None, "MONARCH_TOKIO_WORKER_THREADS", "compatibility"),
        Key("otel_metric_export_interval", "d", 1.0, "OTEL_METRIC_EXPORT_INTERVAL", "telemetry"),
        Key("max_cast_fanout", "i", 16, h + "MESH_MAX_CAST_FANOUT", "broadcast width", True),
        Key("max_cast_dimension_size", "i", 16, h + "MESH_MAX_CAST_DIMENSION_SIZE", "broadcast width"),
        Key("small_write_threshold", "i", 256, "MONARCH_HYPERACTOR_SMALL_WRITE_THRESHOLD", "compatibility"),
        # ours
        Key("busy_wait", "d", 150e-6, "MONARCH_BUSY_WAIT", "awake this long before a wait sleeps; 0s is never"),
        Key("send_queue_limit", "i", 256 << 20, "MONARCH_SEND_QUEUE_LIMIT", "bytes queued per connection", True),
        Key("shm_threshold", "i", 64 << 10, "MONARCH_SHM_THRESHOLD", "least bytes to go by shared memory", True),
        Key(
            "refuse_spawn_on_failed_procs",
            "b",
            False,
            "MONARCH_REFUSE_SPAWN_ON_FAILED_PROCS",
            "no new actors on a process whose actor failed",
        ),
        Key("shm_pool_limit", "i", 1 << 30, "MONARCH_SHM_POOL_LIMIT", "bytes of shared memory a process may hold"),
    ]
    plain: list[tuple[str, str, Any]] = [
        ("read_log_buffer", "i", 100), ("force_file_log", "b", False), ("prefix_with_rank", "b", True),
        ("message_delivery_timeout", "d", 30.0), ("pending_actor_delivery_timeout", "d", 30.0),
        ("message_ack_time_interval", "d", 0.5), ("message_ack_every_n_messages", "i", 1000),
        ("message_ttl_default", "i", 64), ("split_max_buffer_size", "i", 5), ("split_max_buffer_age", "d", 0.05),
        ("channel_net_rx_buffer_full_check_interval", "d", 5.0), ("channel_reconnect_timeout", "d", 60.0),
        ("channel_tcp_keepalive_idle", "d", 60.0), ("enable_dest_actor_reordering_buffer", "b", True),
        ("sequencer_max_locked_keys", "i", 128), ("server_heartbeat_interval", "d", 1.0),
        ("forwarder_flush_timeout", "d", 5.0), ("terminated_snapshot_retention", "i", 100),
        ("process_exit_timeout", "d", 10.0), ("stop_actor_timeout", "d", 10.0), ("cleanup_timeout", "d", 3.0),
        ("process_memory_metric_interval", "d", 300.0),
    ]  # fmt: skip
    rows += [Key(n, k, d, h + n.upper(), n.replace("_", " ")) for n, k, d in plain]
    mesh: list[tuple[str, str, Any]] = [
        ("mesh_proc_spawn_max_idle", "d", 30.0), ("mesh_terminate_timeout", "d", 10.0),
        ("mesh_terminate_concurrency", "i", 16), ("mesh_admin_single_host_timeout", "d", 3.0),
        ("mesh_admin_tree_timeout", "d", 10.0), ("mesh_admin_query_child_timeout", "d", 0.1),
        ("mesh_admin_resolve_actor_timeout", "d", 0.2), ("mesh_admin_max_concurrent_resolves", "i", 2),
        ("mesh_admin_pyspy_timeout", "d", 10.0), ("mesh_admin_pyspy_bridge_timeout", "d", 13.0),
        ("mesh_admin_pyspy_client_timeout", "d", 20.0), ("mesh_admin_pyspy_max_profile_duration", "d", 300.0),
        ("mesh_admin_config_dump_bridge_timeout", "d", 5.0),
    ]  # fmt: skip
    rows += [Key(n, k, d, h + n.upper(), n.replace("_", " ")) for n, k, d in mesh]
    prefixed: list[tuple[str, str, Any]] = [
        ("actor_spawn_max_idle", "d", 30.0), ("get_actor_state_max_idle", "d", 30.0),
        ("get_proc_state_max_idle", "d", 60.0), ("proc_stop_max_idle", "d", 30.0),
        ("supervision_watchdog_timeout", "d", 120.0), ("use_direct_spawn", "b", False),
    ]  # fmt: skip
    rows += [Key(n, k, d, h + "MESH_" + n.upper(), n.replace("_", " ")) for n, k, d in prefixed]
    rows.append(Key("stop_grace_period", "d", 10.0, h + "REMOTE_STOP_GRACE_PERIOD", "grace before the hard stop"))
    bare: list[tuple[str, str, Any]] = [
        ("enable_otel_metrics", "b", True), ("enable_otel_tracing", "b", True), ("enable_recorder_tracing", "b", True),
        ("enable_sqlite_tracing", "b", False), ("scuba_log_enter_exit", "b", False),
    ]  # fmt: skip
    rows += [Key(n, k, d, n.upper(), n.replace("_", " ")) for n, k, d in bare]
    rdma: list[tuple[str, str, Any]] = [
        ("rdma_allow_tcp_fallback", "b", True), ("rdma_disable_ibverbs", "b", False),
        ("rdma_max_chunk_size_mb", "i", 64), ("rdma_ibverbs_target", "s", ""), ("rdma_peer_device_affinity", "s", ""),
        ("rdma_runtime_worker_threads", "i", 4), ("rdma_qp_init_timeout", "d", 30.0),
        ("rdma_tcp_fallback_parallelism", "i", 2), ("rdma_max_nics_per_buffer", "i?", None),
        ("rdma_min_stripe_size_kb", "i", 512), ("rdma_qps_per_cq", "i", 64), ("rdma_cq_poller_per_device", "b", True),
        ("rdma_qps_per_peer", "i", 4), ("rdma_host_odp", "b", False), ("rdma_cq_busy_poll_window", "d?", None),
        ("rdma_disable_vm_access", "b", False), ("rdma_nixl", "s", "auto"),
    ]  # fmt: skip
    rows += [Key(n, k, d, "MONARCH_" + n.upper(), n.replace("_", " ")) for n, k, d in rdma]
    rows.append(Key("enable_unawaited_python_task_traceback", "b", False, "ENABLE_UNAWAITED_PYTHON_TASK_TRACEBACK"))
    return rows


KEYS: dict[str, Key] = {k.name: k for k in _rows()}


def check(key: Key, value: Any) -> Any:
    """`value` in its stored form (durations as seconds). TypeError or ValueError names the key and what it takes."""
    kind = key.kind[0]
    if value is None and key.kind.endswith("?"):
        return None
    if kind == "d":
        try:
            value = durations.parse(value)
        except TypeError as e:
            raise TypeError(f"`{key.name}`: {e}") from None
    elif kind == "i":
        if not isinstance(value, int):
            raise TypeError(f"`{key.name}` takes an integer, not {value!r}")
        value = int(value)
        if value < 0:
            raise TypeError(f"`{key.name}` takes an integer >= 0, not {value}")
    elif kind == "b":
        if not isinstance(value, bool):
            raise TypeError(f"`{key.name}` takes True or False, not {value!r}")
    elif kind == "f":
        if not isinstance(value, (int, float)):
            raise TypeError(f"`{key.name}` takes a number, not {value!r}")
        value = float(value)
    elif kind == "s":
        if not isinstance(value, str):
            raise TypeError(f"`{key.name}` takes text, not {value!r}")
    elif kind == "t":
        value = BindSpec(value)
    elif kind == "e" and not isinstance(value, Encoding):
        raise TypeError(f"`{key.name}` takes an Encoding, not {value!r}")
    if key.positive and not value:
        raise ValueError(f"`{key.name}` must not be zero")
    return value


def from_text(key: Key, text: str) -> Any:
    """A value from an environment variable."""
    kind = key.kind[0]
    if key.kind.endswith("?") and text.lower() in ("", "none"):
        return None
    if kind == "i":
        return check(key, int(text.replace("_", "")))
    if kind == "b":
        if text.lower() not in ("0", "1", "true", "false", "yes", "no", "on", "off"):
            raise ValueError(f"{key.env}={text!r}: expected 1 or 0")
        return text.lower() in ("1", "true", "yes", "on")
    if kind == "f":
        return float(text)
    if kind == "e":
        return Encoding(text)
    return check(key, text)


def shown(key: Key, value: Any) -> Any:
    """A stored value as users read it back; secrets are not shown."""
    if key.name == "auth_key":
        return "***" if value else ""
    return durations.render(value) if key.kind[0] == "d" and value is not None else value
