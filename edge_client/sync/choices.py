"""What a device serves where its fleet lets it choose: the samples to judge by, and the job that does."""

from __future__ import annotations

from replayfleet.edge_client.flow import Samples
from replayfleet.edge_client.learning.training.job import ChooseJob, Chose, RoundFile, TrainDone, TrainFailed
from replayfleet.edge_client.sync.downloads import Agreement, DownloadDesk
from replayfleet.edge_client.sync.parts import Parts
from replayfleet.federation.service.logs import EventLogger
from replayfleet.federation.streams.held_out import held_out

log = EventLogger(__name__)


class ChoiceDesk:
    """Keeps a tenth of a round's samples, in memory alone, until it is chosen what to serve after that round."""

    def __init__(self, parts: Parts, downloads: DownloadDesk) -> None:
        self._parts, self._downloads = parts, downloads
        self._kept: tuple[int, RoundFile] | None = None

    def hold_out(self, samples: Samples, run_seed: int, round_index: int) -> Samples:
        """Keep some of the round's samples to judge by; returns the others, to be trained on."""
        self.forget()
        out = held_out(samples.labels, run_seed, round_index, self._parts.client_id)
        if out.any():
            self._kept = (round_index, RoundFile(Samples(samples.images[out], samples.labels[out])))
        return Samples(samples.images[~out], samples.labels[~out])

    def advance(self, agreed: Agreement | None, now: float) -> None:
        """Have the training process choose, once it is free and a download waits for that. Call often."""
        waiting, parts = self._downloads.to_choose(), self._parts
        if waiting is None or agreed is None or parts.training.job is not None:
            return
        (manifest, served), kept = waiting, self._kept
        parts.training.begin(
            ChooseJob(
                data_dir=str(parts.data_dir),
                client_id=parts.client_id,
                spec=agreed.spec,
                manifest=manifest,
                served=served,
                sampler=parts.compute.sampler,
                num_threads=parts.compute.training_threads,
                held_out=kept[1].path if kept is not None and kept[0] == manifest.round - 1 else "",
                verified=parts.blobs.verified(entry.digest for entry in manifest.blobs),
            ),
            now,
        )

    def chosen(self, job: ChooseJob, ended: TrainDone | TrainFailed | Chose) -> None:
        """The job ended: serve what was chosen, or else what was downloaded."""
        if isinstance(ended, TrainFailed):
            log.warning("no model chosen", round=ended.round, reason=ended.error, next="what was downloaded is served")
        self.forget()
        self._downloads.decide(job.manifest.version, ended.choice if isinstance(ended, Chose) else None)

    def forget(self) -> None:
        """Let go of the samples. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()
