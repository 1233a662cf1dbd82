"""The settings of a process, in the only module that reads them from the environment: argument, environment, default.

Cloud credentials are not here: the storage libraries read their own usual variables.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt.errors import UsageError

HEARTBEAT_S_MIN = 0.01  # each heartbeat is a put

# "given": only configured sources (addresses, Slurm, a file, signals); no cloud is looked for in the firmware.
NOTICES = ("auto", "given", "off")
SIGNALS = ("on", "off")
ACKNOWLEDGE = ("off", "on")
SIGNALS_S_MIN = 0.01
NO_RUN_ID = "none"  # torchrun's run id without --rdzv-id
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # users of Slurm choose SIGUSR1, submitit SIGUSR2
# Signals that mean something else, or that cannot be caught.
UNUSABLE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV)
ORPHAN_LINGERS = 12  # how many CKPT_LINGER_S an agent keeps trying to commit orphaned checkpoints


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one process. All paths are absolute, since the agent works in another folder.

    `runtime_dir`: the folder of sockets and locks, 0700, one per user.
    `launch`: the launch id. A start with the same id is a restart, and waits for no other job.
    `linger_s`: how long an agent whose trainers died keeps their memory for a restart.
    `heartbeat_s`: how often a running epoch writes a sign of life to the store.
    `agent_log`: the file for the agent's standard error; None: a file in runtime_dir.
    `retry_s`: how long a failing store operation is retried.
    `redirect`: (from, to): a Checkpointer of the first URL uses the second (`ckpt rehearse` runs a script beside its
    run).
    `hold_at_step`: the step at which a redirected Checkpointer saves and waits to be killed by the rehearsal; 0: none.
    `restarts_left`: how often the launcher would start this job again if it failed now.
    `notices`: which sources of preemption notices are used; see NOTICES.
    `notice_file`: a path; when it appears, that is a notice.
    `outcome_file`: the file that says what was saved when the job left; None: a file in runtime_dir.
    `acknowledge`: whether the agent may tell a cloud that its planned event may begin at once, after the job has left
    and is in the store; see ACKNOWLEDGE.
    `sigterm_s`, `sigusr1_s`: seconds from that signal to the end of the process. `sigusr1_s` holds for all of
    `warning_signals`.
    `warning_signals`: the signals that are notices, besides SIGTERM.
    `domain`: the failure domains of this node, widest first, such as "zone-a/rack-7".
    `events`: a file to which events are appended, one JSON object a line; None: none.
    `metrics`: (host, port) at which the agent serves Prometheus; the host is an address, not a name; None: not served.
    `listen`: HOST:PORT at which agents of other nodes reach this one; "": any port, on all interfaces.
    `peers`: HOST:PORT of each memory-only node that keeps replicas of this job. Rank 0's setting counts.
    `secret_file`: the file with the run's secret (see docs/guides/nodes.md); None: rank 0 makes a secret.
    `signals`: whether this node's signals, of kernel and accelerators, are read to predict failures; see SIGNALS.
    `signals_interval_s`: how often they are read, in seconds.
    `signals_log`: a file to which the signals are appended, one JSON object a line; None: none.
    `predictor`: a model that was trained on such a log; None: none.
    `slurm_job`, `slurm_end_s`: the Slurm job, and the end of its allocation in Unix seconds; "" and None outside Slurm.
    """

    runtime_dir: Path
    launch: str
    linger_s: float = 300.0
    heartbeat_s: float = 10.0
    agent_log: Path | None = None
    retry_s: float = 120.0
    restarts_left: int = 0
    redirect: tuple[str, str] | None = None
    hold_at_step: int = 0
    notices: str = "auto"
    notice_file: Path | None = None
    outcome_file: Path | None = None
    acknowledge: str = "off"
    sigterm_s: float = 30.0
    sigusr1_s: float = 30.0
    warning_signals: tuple[signal.Signals, ...] = WARNING_SIGNALS
    domain: str = ""
    events: Path | None = None
    metrics: tuple[str, int] | None = None
    listen: str = ""
    peers: tuple[str, ...] = ()
    secret_file: Path | None = None
    signals: str = "on"
    signals_interval_s: float = 5.0
    signals_log: Path | None = None
    predictor: Path | None = None
    slurm_job: str = ""
    slurm_end_s: float | None = None

    @property
    def orphan_s(self) -> float:
        """How long an agent keeps trying to commit checkpoints for which no trainer will come back."""
        return ORPHAN_LINGERS * self.linger_s

    def redirect_url(self, url: str) -> str:
        """The URL to use for `url`: another one if `redirect` names it."""
        return self.redirect[1] if self.redirect is not None and url == self.redirect[0] else url


# Prefixes of the variables that the storage libraries read.
STORE_VARIABLES = ("AWS_", "GOOGLE_", "GCS_", "AZURE_", "AZURITE_", "S3_")
# Those of the variables that are paths.
STORE_FILES = (
    *("AWS_CA_BUNDLE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT"),
    *("GOOGLE_SERVICE_ACCOUNT_PATH", "AZURE_FEDERATED_TOKEN_FILE"),
)


def store_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that lead to the store, with paths made absolute, as they are sent to agents. Errors: UsageError if
    a variable cannot be sent."""
    found = _store_variables(os.environ if env is None else env)
    for name in found:
        _read_sendable(found, name)
    return found


def _store_variables(env: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in sorted(env.items()) if name.startswith(STORE_VARIABLES)}
    return found | {name: os.path.abspath(os.path.expanduser(found[name])) for name in STORE_FILES if found.get(name)}


def _read_sendable(env: Mapping[str, str], name: str) -> str:
    """The value of a variable that is sent to agents. It may be a secret, so errors do not show it. Errors:
    UsageError."""
    try:
        f"{name}{env[name]}".encode()
    except UnicodeEncodeError:
        shown = name.encode(errors="backslashreplace").decode()
        raise UsageError(f"{shown} is no UTF-8; change or unset it") from None
    return env[name]


def adopt_store_environment(wanted: Mapping[str, str]) -> bool:
    """Makes `wanted` the store variables of this process. Returns whether that changed any."""
    before = _store_variables(os.environ)
    for name in before.keys() - wanted.keys():
        del os.environ[name]
    os.environ.update({name: wanted[name] for name in wanted if name.startswith(STORE_VARIABLES)})
    return before != _store_variables(os.environ)


def read_variables(names: Iterable[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Those of the named variables that are set. For code that reads a library's usual variables, such as those of the
    clouds' metadata services. Errors: UsageError."""
    env = os.environ if env is None else env
    return {name: _read_sendable(env, name) for name in names if name in env}


def _number(env: Mapping[str, str], name: str, default: float, least: float = 0.0) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < float("inf"):
        raise UsageError(
            f"{name}={text!r} is not a number of at least {least:g}; unset it or give one, such as {default:g}"
        )
    return value


def _pair(name: str, text: str) -> tuple[str, str]:
    try:
        pair = json.loads(text)
    except (ValueError, RecursionError):
        pair = None
    if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(url, str) for url in pair):
        raise UsageError(f"{name}={text!r} is not a JSON list of two URLs; unset it")
    return pair[0], pair[1]


def _one_of(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    text = env.get(name) or choices[0]
    if text not in choices:
        raise UsageError(f"{name}={text!r} is none of {', '.join(choices)}; unset it or give one of them")
    return text


def _address(name: str, text: str) -> tuple[str, int]:
    """(host, port) to listen on. The host is a literal address: a name look-up could block the agent's one thread for
    long."""
    import ipaddress

    host, colon, port = text.rpartition(":")
    host = {"": "127.0.0.1", "localhost": "127.0.0.1"}.get(host, host)
    try:
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        found = ipaddress.ip_address(bare)
        right = bool(colon) and port.isascii() and port.isdecimal() and int(port) <= 65535
        right = right and (found.version == 4) == (bare == host)
    except ValueError:
        right = False
    if not right:
        raise UsageError(
            f"{name}={text[:200]!r} is no address to listen on; unset it or give :PORT (this host only), 0.0.0.0:PORT "
            "or [::]:PORT (all that can reach it)"
        )
    return bare, int(port)


def _find_warning_signals(named: str) -> tuple[signal.Signals, ...]:
    """The signals that are warnings, with the one that submitit told Slurm to send: "USR2" or "SIGUSR2"."""
    number = signal.Signals.__members__.get("SIG" + named.removeprefix("SIG"))
    is_more = number is not None and number not in (*WARNING_SIGNALS, *UNUSABLE_SIGNALS)
    return (*WARNING_SIGNALS, number) if number is not None and is_more else WARNING_SIGNALS


def _path(env: Mapping[str, str], name: str) -> Path | None:
    """The path in that variable, made absolute: the agent works in another folder than the trainer that started it."""
    return Path(os.path.abspath(env[name])) if env.get(name) else None


def _process_name(pid: int) -> str:
    """A name for exactly that process. Its start time is part of it: in many containers the process has the number 1,
    and one that is started again is another start."""
    began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]  # in clock ticks since the boot
    return f"{os.uname().nodename}-pid-{pid}-{began}"


def _launch(env: Mapping[str, str]) -> str:
    """The launch id. Without a run id torchrun uses "none" for every job; then the id names torchrun's own process, our
    parent, which all restarts of its workers have in common."""
    run = env.get("TORCHELASTIC_RUN_ID")
    named = env.get("CKPT_LAUNCH") or env.get("SLURM_JOB_ID") or (run if run != NO_RUN_ID else "")
    if named:
        return named
    if run == NO_RUN_ID:
        # The parent may be gone, or hidden from this process.
        with contextlib.suppress(OSError):
            return _process_name(os.getppid())
    return _process_name(os.getpid())


def _slurm_job(env: Mapping[str, str]) -> str:
    """The job as Slurm's commands take it. The SLURM_JOB_ID of one member of an array is that of the whole array."""
    array, member = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{member}" if array and member else env.get("SLURM_JOB_ID", "")


def read_settings(env: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process. Errors: UsageError, which names the variable that does not parse."""
    env = os.environ if env is None else env
    runtime = env.get("CKPT_RUNTIME_DIR") or os.path.join(env.get("XDG_RUNTIME_DIR") or "/tmp", f"ckpt-{os.getuid()}")
    redirect, metrics = env.get("CKPT_REDIRECT"), env.get("CKPT_METRICS")
    sent = read_variables(("CKPT_NOTICE_FILE", "CKPT_OUTCOME_FILE"), env)
    return Settings(
        runtime_dir=Path(os.path.abspath(runtime)),
        launch=_launch(env)[:200].encode(errors="backslashreplace").decode(),  # agents speak UTF-8
        linger_s=_number(env, "CKPT_LINGER_S", 300.0),
        heartbeat_s=_number(env, "CKPT_HEARTBEAT_S", 10.0, HEARTBEAT_S_MIN),
        agent_log=_path(env, "CKPT_AGENT_LOG"),
        retry_s=_number(env, "CKPT_RETRY_S", 120.0),
        redirect=_pair("CKPT_REDIRECT", redirect) if redirect else None,
        hold_at_step=int(_number(env, "CKPT_HOLD_AT", 0)),
        restarts_left=int(_number(env, "TORCHELASTIC_MAX_RESTARTS", 0) - _number(env, "TORCHELASTIC_RESTART_COUNT", 0)),
        notices=_one_of(env, "CKPT_NOTICES", NOTICES),
        notice_file=_path(sent, "CKPT_NOTICE_FILE"),
        outcome_file=_path(sent, "CKPT_OUTCOME_FILE"),
        acknowledge=_one_of(env, "CKPT_ACKNOWLEDGE", ACKNOWLEDGE),
        sigterm_s=_number(env, "CKPT_SIGTERM_S", 30.0),
        sigusr1_s=_number(env, "CKPT_SIGUSR1_S", 30.0),
        warning_signals=_find_warning_signals(env.get("SUBMITIT_PREEMPT_SIGNAL", "")),
        domain=env.get("CKPT_DOMAIN", "")[:1000],
        events=_path(env, "CKPT_EVENTS"),
        metrics=_address("CKPT_METRICS", metrics) if metrics else None,
        listen=env.get("CKPT_LISTEN", ""),
        peers=tuple(each.strip() for each in env.get("CKPT_PEERS", "").split(",") if each.strip()),
        secret_file=_path(env, "CKPT_SECRET_FILE"),
        signals=_one_of(env, "CKPT_SIGNALS", SIGNALS),
        signals_interval_s=_number(env, "CKPT_SIGNALS_S", 5.0, SIGNALS_S_MIN),
        signals_log=_path(env, "CKPT_SIGNALS_LOG"),
        predictor=_path(env, "CKPT_PREDICTOR"),
        slurm_job=_slurm_job(env),
        slurm_end_s=int(end) if re.fullmatch("[0-9]{1,12}", end := env.get("SLURM_JOB_END_TIME", "")) else None,
    )
