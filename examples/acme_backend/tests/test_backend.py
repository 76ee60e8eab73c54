"""What the kit cannot know: which firmware is refused, and what people read of calls that the copy engine cannot serve."""

import pytest
import torch

import kvdock
from kvdock_acme.backend import AcmeBackend


@pytest.mark.parametrize(("firmware", "state"), [("1", kvdock.plugin.ProbeState.UNUSABLE), ("2", kvdock.plugin.ProbeState.READY)])
def test_which_firmware_will_do(firmware: str, state: kvdock.plugin.ProbeState, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_FIRMWARE", firmware)
    probe = AcmeBackend().probe()
    assert probe.state is state
    assert f"firmware {firmware}" in probe.reason


def arguments(pool: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the arguments of a write of three tokens, in the schema's order."""
    return pool, pool.clone(), rows, rows.clone(), torch.arange(3), None, None


@pytest.mark.parametrize(
    ("pool", "rows", "reason"),
    [
        (torch.zeros(4, 8, 2, 5), torch.zeros(3, 2, 5), ""),
        (torch.zeros(4, 8, 2, 4, dtype=torch.bfloat16), torch.zeros(25, dtype=torch.bfloat16)[1:].view(3, 2, 4), "addresses that are"),
        (torch.zeros(4, 8, 2, 5, dtype=torch.bfloat16), torch.zeros(3, 2, 5, dtype=torch.bfloat16), "vectors of 5 elements of 2 bytes"),
        (torch.zeros(4, 8, 2, 4, dtype=torch.float64), torch.zeros(3, 2, 4, dtype=torch.float64), "not torch.float64"),
    ],
    ids=["any multiple of 4 bytes", "odd address", "odd rows", "dtype"],
)
def test_what_the_copy_engine_serves(pool: torch.Tensor, rows: torch.Tensor, reason: str) -> None:
    found = kvdock.runtime.default().dispatcher.explain("paged_caching_", arguments(pool, rows), "acme")
    assert found.served_by == ("portable" if reason else "acme")
    assert reason in str(found.rejected)
