"""pFedGRP whose sub-generators are trained with DP-SGD; it takes the extra ``[dp]``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from replayfleet.federation.errors import SettingsError
from replayfleet.federation.methods import pfedgrp
from replayfleet.federation.methods.fedavg import FedAvg
from replayfleet.federation.methods.kit import privacy
from replayfleet.federation.methods.kit.packing import same_bits
from replayfleet.federation.methods.kit.privacy import Account, Trained, account_among, epsilon_of
from replayfleet.federation.methods.kit.seeding import seeded_generator
from replayfleet.federation.methods.pfedgrp import PFedGRP
from replayfleet.federation.methods.pfedgrp_records import AggregatorState, ClientState, Download, Upload
from replayfleet.federation.methods.steps.replay import eager_sampler
from tests.support.toy import SHORT_PFEDGRP, TOY, toy_data

OPEN = PFedGRP(task=TOY, gate=False, **SHORT_PFEDGRP)
PRIVATE = replace(OPEN, dp_noise_multiplier=2.0)
SAMPLER = eager_sampler(TOY)


def local_round(
    method: PFedGRP, state: ClientState, counts: dict[int, int], index: int, download: Download | None = None
) -> tuple[ClientState, Upload]:
    held = download or method.initial_download(seeded_generator(0, 0, "initial"))
    return method.local_round(
        state, toy_data(counts, seed=index), held, seeded_generator(0, index, "a"), sampler=SAMPLER
    )


@pytest.fixture(scope="module")
def two_rounds() -> list[tuple[ClientState, Upload]]:
    first = local_round(PRIVATE, ClientState(), {0: 10, 1: 16}, 0)
    restarted = ClientState.unpack(first[0].pack())
    return [first, local_round(PRIVATE, restarted, {0: 10, 2: 8}, 1)]


def test_an_upload_says_what_each_of_the_clients_classes_has_cost(
    two_rounds: list[tuple[ClientState, Upload]],
) -> None:
    _, upload = two_rounds[0]
    assert upload.privacy.histories == {0: (Trained(2.0, 0.8, 2),), 1: (Trained(2.0, 0.5, 2),)}
    assert upload.privacy.epsilons == {c: epsilon_of(h, 1e-5) for c, h in upload.privacy.histories.items()}
    assert account_among(Upload, upload.pack().facts) == upload.privacy
    assert account_among(FedAvg.Upload, upload.pack().facts) is None


def test_rounds_of_a_class_compose_over_a_restart(two_rounds: list[tuple[ClientState, Upload]]) -> None:
    accounts = [upload.privacy for _, upload in two_rounds]
    assert accounts[0] is not None
    assert accounts[1].histories[0] == (Trained(2.0, 0.8, 4),)
    assert accounts[1].epsilons[0] > accounts[0].epsilons[0]
    assert accounts[1].histories[1] == accounts[0].histories[1]
    assert sorted(accounts[1].epsilons) == [0, 1, 2]


def test_a_client_that_lost_its_disk_gets_its_account_back(two_rounds: list[tuple[ClientState, Upload]]) -> None:
    _, upload = two_rounds[0]
    state, downloads = PRIVATE.aggregate(
        AggregatorState(), {"a": upload}, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER
    )
    kept = AggregatorState.unpack(state.pack())
    download = Download.unpack(PRIVATE.download_for(kept, "a", downloads["a"]).pack())
    _, again = local_round(PRIVATE, ClientState(), {0: 10}, 1, download)
    assert again.privacy.histories[0] == (Trained(2.0, 0.8, 4),)
    assert again.privacy.histories[1] == upload.privacy.histories[1]


def test_a_client_whose_disk_is_an_earlier_copy_counts_what_it_spent_since(
    two_rounds: list[tuple[ClientState, Upload]],
) -> None:
    (earlier, _), (_, last) = two_rounds
    _, downloads = PRIVATE.aggregate(
        AggregatorState(), {"a": last}, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER
    )
    _, again = local_round(PRIVATE, earlier, {0: 10}, 2, downloads["a"])
    assert again.privacy.histories[0] == (Trained(2.0, 0.8, 6),)
    assert again.privacy.histories[1] == last.privacy.histories[1]


def test_the_task_model_is_trained_as_it_would_be_without(two_rounds: list[tuple[ClientState, Upload]]) -> None:
    _, private = two_rounds[0]
    _, without = local_round(OPEN, ClientState(), {0: 10, 1: 16}, 0)
    assert same_bits(private.task_parameters, without.task_parameters)
    assert not same_bits(private.sub_generators[0], without.sub_generators[0])


def test_without_it_no_record_says_anything_of_privacy() -> None:
    state, upload = local_round(OPEN, ClientState(), {0: 10}, 0)
    aggregated, downloads = OPEN.aggregate(
        AggregatorState(), {"a": upload}, seeded_generator(0, 0, "aggregator"), sampler=SAMPLER
    )
    assert upload.privacy is None
    for record in (state, upload, aggregated, downloads["a"]):
        assert not {"privacy", "histories"} & record.pack().facts.keys()
        assert "privacy" not in record.pack().facts.get("clients", {}).get("a", {})


def test_a_class_is_not_trained_again_where_that_would_pass_the_bound(
    two_rounds: list[tuple[ClientState, Upload]],
) -> None:
    state, upload = two_rounds[0]
    bound = upload.privacy.epsilons[0] * 1.01
    bounded = replace(PRIVATE, dp_max_epsilon=bound)
    after, second = local_round(bounded, state, {0: 10, 2: 8}, 1)
    assert second.num_updates == (1 if epsilon_of((Trained(2.0, 1.0, 1),), 1e-5) <= bound else 0)
    assert same_bits(after.sub_generators[0].generator, state.sub_generators[0].generator)
    assert second.privacy.epsilon <= bound
    _, none_at_all = local_round(replace(PRIVATE, dp_max_epsilon=1e-6), ClientState(), {0: 10}, 0)
    assert none_at_all.sub_generators == {}
    assert none_at_all.privacy == Account(1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"privacy": None}, "nothing is said of privacy"),
        ({"privacy": Account(1e-3)}, "isn't what this fleet agreed on"),
        ({"privacy": Account(1e-5, {3: (Trained(2.0, 1.0, 1),)}, {3: 1.0})}, "class 3 has an account"),
        ({"privacy": Account(1e-5)}, "class 0 has an account of privacy without samples, or a sub-generator without"),
    ],
)
def test_an_upload_with_an_account_of_something_else_is_refused(
    two_rounds: list[tuple[ClientState, Upload]], changes: dict[str, Any], reason: str
) -> None:
    _, upload = two_rounds[0]
    PRIVATE.check_upload(upload)
    with pytest.raises(ValueError, match=reason):
        PRIVATE.check_upload(replace(upload, **changes))


def test_a_fleet_without_takes_no_account(two_rounds: list[tuple[ClientState, Upload]]) -> None:
    _, upload = two_rounds[0]
    OPEN.check_upload(replace(upload, privacy=None))
    with pytest.raises(ValueError, match="isn't what this fleet agreed on"):
        OPEN.check_upload(upload)


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp_noise_multiplier": 0.05},
        {"dp_noise_multiplier": -1.0},
        {"dp_noise_multiplier": float("nan")},
        {"dp_max_grad_norm": 0.0},
        {"dp_delta": 0.0},
        {"dp_delta": 1.0},
        {"dp_max_epsilon": -1.0},
        {"generators": "single"},
        {"sub_generator_epochs": 0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"dp_|sub_generator_epochs"):
        replace(PRIVATE, **wrong)


def test_without_opacus_a_round_says_so_before_anything_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(privacy.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pfedgrp, "with_replay", lambda *args: pytest.fail("it went on"))
    with pytest.raises(SettingsError, match=r"install replayfleet\[dp\]"):
        local_round(PRIVATE, ClientState(), {0: 4}, 0)
