"""What can go wrong in training, by whose fault it is."""

from __future__ import annotations

from farandole.protocol.wire.errors import FarandoleError


class TrainingError(FarandoleError, ValueError):
    """Base of every error that this package raises on purpose; its message is for people."""


class DataError(TrainingError):
    """This node's text or tokenizer is missing, too small, or not the run's."""


class NoSliceError(TrainingError):
    """No slice of the data is this node's now; there may be one soon."""


class DivergedError(TrainingError):
    """This node's own weights are no longer finite: its learning rate is too high, or its hardware errs."""


class CodecError(TrainingError):
    """A tensor cannot be encoded, or bytes are no encoded tensor: wrong length, or a value that is not finite."""


class ScreeningError(TrainingError):
    """A partner's contribution is refused; nothing of it was used."""


class CheckpointError(TrainingError):
    """A checkpoint is not one of this run, is damaged, or is hostile; nothing of it was used."""


class UnfitWeightsError(CheckpointError):
    """A peer gave a checkpoint that cannot be used; another's may do."""


class ActivationError(TrainingError):
    """Activations or their gradient are not finite, or not of the size that they must have."""


class OutlierError(ActivationError):
    """Activations or their gradient are unlike what came before (`farandole.training.engine.link_statistics`)."""
