"""Which runs of a built-in model accept members with training loops of their own (`training.cluster.external`).

A loop exchanges whole contributions in the order of the model's parameters, as a built-in trainer does. It brings its
own optimizer and data, so what a manifest says of inner steps does not bind it. A run that depends on its members'
inner steps or batches is refused.
"""

from __future__ import annotations

from .manifest import Manifest


def why_no_loop(manifest: Manifest) -> str:
    """Return why no member may train this run in a loop of its own; empty if members may."""
    if manifest.model.external is not None:
        return ""
    if manifest.model.num_stages > 1:
        return (
            f"its model is cut into {manifest.model.num_stages} stages (model.num_stages), and a loop trains the whole "
            "model"
        )
    if manifest.audits:
        return "its members replay each other's rounds (audits), and no member can replay a loop's"
    if manifest.inner.deterministic:
        return "its inner steps have the same bits on all machines (inner.deterministic), and a loop's are its own"
    if manifest.data.epochs:
        return "its members divide the text among them (data.epochs), and a loop draws its own data"
    if manifest.data.mask_documents:
        return "its tokens attend to their own document alone (data.mask_documents), and a loop's model is its own"
    if manifest.rounds.partners > 1:
        return (
            f"its members meet {manifest.rounds.partners} partners after their inner steps (rounds.partners), and a "
            "loop takes steps before each"
        )
    if manifest.outer.drift:
        return (
            "its inner steps correct the drift of the members (outer.drift), which sums to zero only if all members' "
            "do, and a loop's do not"
        )
    return ""


def tokens_of_step(manifest: Manifest) -> int:
    """Return the tokens of a built-in trainer's inner step, by which its schedule counts; 0: only loops train."""
    return 0 if manifest.model.external is not None else manifest.inner.batch_size * manifest.model.context
