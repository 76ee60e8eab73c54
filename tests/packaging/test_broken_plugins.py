"""A broken plugin becomes a record with state, reason and traceback, and breaks neither kvdock nor any other plugin."""

from __future__ import annotations

import pytest

from kvdock.plugins.records import PluginState
from support_distributions import Environments, Report, report, reports
from support_projects import Environment

QUESTIONS = (("meta", None), ("meta", "import_error"), ("meta", "probe-raises"), ("meta", "absent"), ("meta", "no-such"))
HOOKS = "kvdock_backends(), kvdock_ops(), kvdock_prefix_caches(), kvdock_transports()"
NOT_FINE = ("import_error", "syntax_error", "sys_exit", "base_exception", "stale", "other_major", "misspelt", "probe_raises")


@pytest.fixture(scope="module")
def faulty(environments: Environments) -> Environment:
    """An environment with a distribution of many faulty plugins and a healthy one; the module of one is gone."""
    environment = environments.with_projects("kvdock-faults")
    (environment.site_packages / "kvdock_faults" / "stale.py").unlink(missing_ok=True)
    return environment


@pytest.fixture(scope="module")
def outcome(faulty: Environment, environments: Environments) -> Report:
    """What became of all of them in one process."""
    return Report.of_dict(environments.once("faults-report", lambda: reports(faulty, [{}], *QUESTIONS))[0])


@pytest.mark.slow
def test_import_kvdock_loads_no_plugin(outcome: Report) -> None:
    assert outcome.early == []


def test_every_other_plugin_still_works(outcome: Report) -> None:
    assert outcome.of("healthy").state is PluginState.READY
    assert outcome.loaded.count("healthy") == 1
    assert outcome.answers[0]["backend"] == "healthy"


def test_import_error_at_import(outcome: Report) -> None:
    record = outcome.of("import_error")
    assert record.state is PluginState.LOAD_FAILED
    assert record.reason == "importing kvdock_faults.import_error raised ImportError: libacme.so.7: cannot open shared object file"
    assert "import_error.py" in record.traceback
    assert record.traceback.rstrip().endswith("ImportError: libacme.so.7: cannot open shared object file")


def test_syntax_error_at_import(outcome: Report) -> None:
    record = outcome.of("syntax_error")
    assert record.state is PluginState.LOAD_FAILED
    assert record.reason.startswith("importing kvdock_faults.syntax_error raised SyntaxError: invalid syntax (syntax_error.py, line 1)")
    assert "def broken(:" in record.traceback


def test_sys_exit_at_import(outcome: Report) -> None:
    record = outcome.of("sys_exit")
    assert record.state is PluginState.LOAD_FAILED
    assert record.reason == "importing kvdock_faults.sys_exit raised SystemExit: no licence found"
    assert "sys.exit('no licence found')" in record.traceback


def test_base_exception_at_import(outcome: Report) -> None:
    record = outcome.of("base_exception")
    assert (record.state, record.reason) == (
        PluginState.LOAD_FAILED,
        "importing kvdock_faults.base_exception raised Odd: very odd",
    )


def test_stale_metadata_names_the_module_and_the_fix(outcome: Report) -> None:
    record = outcome.of("stale")
    assert record.state is PluginState.LOAD_FAILED
    assert record.reason == (
        "there is no module 'kvdock_faults.stale', which the metadata of kvdock-faults 1.0 names: it is stale. "
        "Fix: pip uninstall kvdock-faults, or install it again"
    )


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("other_major", "(2, 0). Fix: install versions"),
        ("newer_minor", "(1, 99). Fix: install versions"),
        ("no_version", "nothing. Fix: add it"),
    ],
)
def test_plugin_for_another_api_version(outcome: Report, name: str, got: str) -> None:
    record = outcome.of(name)
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason.startswith(f"KVDOCK_API: expected (1, 0), as a module constant beside the hook, got {got}")


def test_plugin_that_returns_no_backend_object(outcome: Report) -> None:
    record = outcome.of("not_a_backend")
    assert (record.state, record.reason) == (PluginState.INCOMPATIBLE, "kvdock_backends()[0]: expected a Backend, got 'acme' (str)")


def test_misspelt_hook_is_refused_with_the_right_name(outcome: Report) -> None:
    record = outcome.of("misspelt")
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason == (f"hook: expected {HOOKS}, got kvdock_backend. Fix: rename it to kvdock_backends")


def test_wrong_hook_arguments_print_both_signatures(outcome: Report) -> None:
    record = outcome.of("wrong_arguments")
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason.startswith(f"hook: expected {HOOKS}, got kvdock_backends(config); Argument(s) {{'config'}}")


def test_nothing_of_a_plugin_with_one_bad_hook_stays(outcome: Report) -> None:
    # Its other hook is fine, and pluggy 1.6 would keep it registered.
    assert "wrong_arguments" not in outcome.caches


def test_plugin_without_hook(outcome: Report) -> None:
    record = outcome.of("no_hook")
    assert record.state is PluginState.INCOMPATIBLE
    assert record.reason.startswith(f"hooks: expected at least one of {HOOKS}, got none")


def test_plugin_that_calls_an_op_when_imported(outcome: Report) -> None:
    record = outcome.of("calls_an_op")
    assert record.state is PluginState.LOAD_FAILED
    assert record.reason == (
        "importing kvdock_faults.calls_an_op raised DiscoveryReentryError: backends were asked for while they are being loaded "
        "(import of kvdock_faults.calls_an_op). Fix: a plugin must not call ops, create caches or ask for backends when it is "
        "imported or in its hooks"
    )


def test_probe_that_raises_is_unusable_with_its_traceback(outcome: Report) -> None:
    record = outcome.of("probe_raises")
    assert (record.state, record.reason) == (PluginState.UNUSABLE, "probe() raised OSError: /dev/acme0: permission denied")
    assert "in probe" in record.traceback


def test_probe_of_the_wrong_parts_is_incompatible(outcome: Report) -> None:
    record = outcome.of("probe_odd")
    expected = "probe() of backend 'probe-odd': state: expected a ProbeState, got 'ready' (str)"
    assert (record.state, record.reason) == (PluginState.INCOMPATIBLE, expected)


def test_absent_hardware_is_quiet_and_the_broken_is_loud(outcome: Report) -> None:
    texts = [text for kind, text in outcome.warnings if kind == "KVDockWarning"]
    assert not [text for text in texts if "plugin 'absent'" in text or "plugin 'healthy'" in text]
    for name in NOT_FINE:
        assert [text for text in texts if f"plugin {name!r} (kvdock-faults 1.0) is" in text], name


def test_named_backend_that_failed_raises_with_its_reason(outcome: Report) -> None:
    _, failed, unusable, absent, unknown = outcome.answers
    assert failed["error"] == unusable["error"] == absent["error"] == unknown["error"] == "BackendUnavailableError"
    assert failed["text"] == (
        "backend 'import_error', asked for by name: plugin 'import_error' (kvdock-faults 1.0) is LOAD_FAILED: "
        "importing kvdock_faults.import_error raised ImportError: libacme.so.7: cannot open shared object file"
    )
    assert "UNUSABLE: probe() raised OSError: /dev/acme0: permission denied (plugin 'probe_raises' (kvdock-faults 1.0))" in unusable["text"]
    assert "ABSENT: no acme card" in absent["text"]
    assert "there is none of this name. Ready: " in unknown["text"]
    assert "healthy" in unknown["text"]


def test_unusable_backend_for_the_same_kind_of_device_is_told_with_the_choice(outcome: Report) -> None:
    # 'healthy' serves meta tensors, and somebody else might have: the reason says that it is broken, and how.
    assert outcome.answers[0]["text"].startswith("only ready backend that claims meta; ")
    assert "probe-unusable is UNUSABLE: driver 3 is too old, needs 5" in outcome.answers[0]["text"]


@pytest.mark.slow
def test_tensor_on_the_device_of_a_failed_backend_raises_with_its_reason(faulty: Environment) -> None:
    answer = report(faulty, ("meta", None), KVDOCK_BACKENDS="import_error,probe_unusable").answers[0]
    assert answer["error"] == "NoBackendError"
    assert "copy_blocks_: no backend that is ready claims meta. Installed: " in answer["text"]
    assert "import_error (LOAD_FAILED: importing kvdock_faults.import_error raised ImportError: libacme.so.7" in answer["text"]
    assert "probe-unusable (UNUSABLE: driver 3 is too old, needs 5)" in answer["text"]
    assert "healthy (BLOCKED: KVDOCK_BACKENDS does not name it; it names import_error, probe_unusable)" in answer["text"]


@pytest.mark.slow
def test_doctor_shows_the_tracebacks(faulty: Environment) -> None:
    done = faulty.kvdock("doctor", environ={"KVDOCK_BACKENDS": "import_error,syntax_error,sys_exit"})
    assert done.returncode == 1, done.stderr
    for line in ("libacme.so.7: cannot open shared object file", "def broken(:", "sys.exit('no licence found')"):
        assert line in done.stdout
    assert "needs attention: import_error, syntax_error, sys_exit" in done.stdout
