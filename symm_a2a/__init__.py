"""All-to-all for mixture-of-experts expert parallelism, in Triton on symmetric memory."""

from symm_a2a import runtime

runtime.choose_runtime()

from symm_a2a import baselines, reference, testing  # noqa: E402
from symm_a2a.alignment import Alignment, align_blocks  # noqa: E402
from symm_a2a.checkpointing import checkpoint_ops  # noqa: E402
from symm_a2a.config import EPConfig  # noqa: E402
from symm_a2a.dispatcher import SymmTokenDispatcher  # noqa: E402
from symm_a2a.domino import Domino, Stages, group_batches, token_shares  # noqa: E402
from symm_a2a.errors import (  # noqa: E402
    CapacityError,
    ClosedError,
    ConfigError,
    DoubleBackwardError,
    EnvironmentUnsupportedError,
    ExchangeError,
    ExchangeMismatchError,
    ExpertIdError,
    InputError,
    JoinedTwiceError,
    LaneBusyError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    RecordingError,
    ScheduleError,
    SymmA2AError,
)
from symm_a2a.handle import Handle, PendingAgain, PendingCombine, PendingDispatch  # noqa: E402
from symm_a2a.load import Load  # noqa: E402
from symm_a2a.memory import Link  # noqa: E402
from symm_a2a.placement import Placement  # noqa: E402
from symm_a2a.rebalance import rebalance  # noqa: E402
from symm_a2a.stats import Stats  # noqa: E402
from symm_a2a.timeline import Timeline, save_picture, save_trace  # noqa: E402
from symm_a2a.token_shards import gather_tokens, shard_tokens  # noqa: E402
from symm_a2a.ulysses import SequenceGroup, head_to_seq, seq_to_head  # noqa: E402
from symm_a2a.version import __version__  # noqa: E402
from symm_a2a.virtual import VirtualWorld  # noqa: E402

__all__ = [
    "Alignment",
    "CapacityError",
    "ClosedError",
    "ConfigError",
    "Domino",
    "DoubleBackwardError",
    "EPConfig",
    "EnvironmentUnsupportedError",
    "ExchangeError",
    "ExchangeMismatchError",
    "ExpertIdError",
    "Handle",
    "InputError",
    "JoinedTwiceError",
    "LaneBusyError",
    "Link",
    "Load",
    "PeerLostError",
    "PeerTimeoutError",
    "PendingAgain",
    "PendingCombine",
    "PendingDispatch",
    "Placement",
    "ProtocolError",
    "RecordingError",
    "ScheduleError",
    "SequenceGroup",
    "Stages",
    "Stats",
    "SymmA2AError",
    "SymmTokenDispatcher",
    "Timeline",
    "VirtualWorld",
    "__version__",
    "align_blocks",
    "baselines",
    "checkpoint_ops",
    "gather_tokens",
    "group_batches",
    "head_to_seq",
    "rebalance",
    "reference",
    "save_picture",
    "save_trace",
    "seq_to_head",
    "shard_tokens",
    "testing",
    "token_shares",
]
