"""Execution providers, each proved by an inference."""

from __future__ import annotations

from replayfleet.devices.installing import what_to_install
from replayfleet.devices.probing import Board
from replayfleet.devices.profiles import CPU, TENSORRT, DeviceProfile, required_provider
from replayfleet.edge_client.doctor.findings import Finding, failure, ok, skipped, warning


def look_at_provider(
    name: str, provider: str, profile: DeviceProfile, board: Board, require: str = ""
) -> list[Finding]:
    """Return whether a provider computes, and how much this profile minds if it doesn't.

    Args:
        name: of the provider, as ``--require-provider`` takes it.
        provider: ONNX Runtime's name.
        profile: what the client is started with.
        board: what it runs on.
        require: the provider that must be there; empty: the profile's first.
    """
    from replayfleet.devices.providers import try_provider

    check = f"provider.{name}"
    wanted = required_provider(require) if require else profile.execution_providers[0]
    try:
        trial = try_provider(provider)
    except ImportError as error:
        if provider in {CPU, wanted}:
            return [failure(check, f"{error}: it can't be tried", "install onnxruntime first")]
        return [skipped(check, f"{error}: it can't be tried")]
    facts = {"listed": trial.listed, "works": trial.works, "missing": list(trial.missing), "wanted": provider == wanted}
    if trial.works:
        role = "" if provider in {wanted, CPU} else f"; --device {profile.name} serves with {wanted} first"
        return [ok(check, f"proved by an inference{role}", **facts)]
    advice = what_to_install(provider, trial.missing, board)
    if provider in {CPU, wanted}:
        return [failure(check, trial.problem, advice, **facts)]
    if trial.listed or (provider == TENSORRT and profile.tensorrt):
        return [warning(check, trial.problem, advice, **facts)]
    return [skipped(check, f"{trial.problem}; --device {profile.name} doesn't need it", **facts)]
