"""The numbers that decisions depend on. A change here is a change of decisions: raise CORE_VERSION with it.

All times are milliseconds of the pool clock, which follows the broker's append times and never runs faster than they do.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "BACKOFF_BASE_MS",
    "BACKOFF_MAX_MS",
    "BRAKE_ATTEMPTS_SHARE_PERCENT",
    "BRAKE_COUNT_MIN",
    "BRAKE_KEPT_MAX",
    "BRAKE_NODES_SHARE_PERCENT",
    "BRAKE_WINDOW_MS",
    "CLOCK_STEP_MAX_MS",
    "COMMANDS_PER_STEP_MAX",
    "COMMAND_RESEND_MAX_MS",
    "COMMAND_RESEND_MS",
    "COMMAND_SEQ_ADOPTED_MAX",
    "COMMAND_VALID_MS",
    "CORE_VERSION",
    "ENDED_KEPT_MAX",
    "FITS_PER_STEP_MAX",
    "KINDS_PER_STEP_MAX",
    "NAME_ALERT_MS",
    "PRIORITY_MAX",
    "PRIORITY_POINT_MS",
    "QUEUED_MAX",
    "REASONS_PER_STEP_MAX",
    "START_TIMEOUT_MS",
    "STOP_GRACE_S",
    "TERMINAL_KEPT_MS",
    "TIMERS_PER_STEP_MAX",
]

CORE_VERSION: Final = 4

CLOCK_STEP_MAX_MS: Final = 2_000  # one input moves the clock at most this far: an outage of the broker expires nothing
COMMAND_VALID_MS: Final = 60_000  # an agent ignores a placement older than this; the scheduler sends it again
COMMAND_RESEND_MS: Final = 4_000  # two heartbeats without the command applied; doubled each time
COMMAND_RESEND_MAX_MS: Final = 64_000  # so that heartbeats which queued up while the scheduler stood still do not repeat it each time
COMMAND_SEQ_ADOPTED_MAX: Final = 2**52  # what an agent may say it has applied; messages hold numbers below 2**53
NAME_ALERT_MS: Final = 600_000  # between two alerts about one node's name, while a second agent keeps asking for it
START_TIMEOUT_MS: Final = 180_000  # placement → every replica running; importing torch on a cold disk takes up to a minute
STOP_GRACE_S: Final = 30  # a checkpoint of a gigabyte needs about two seconds, a slow store ten times that
BACKOFF_BASE_MS: Final = 1_000
BACKOFF_MAX_MS: Final = 300_000
FIGURE_MAX: Final = 2**62  # of what a training reports, in thousandths: the journal's integers have 64 bits
TERMINAL_KEPT_MS: Final = 25 * 3_600_000  # uids are remembered for longer than the 24 h after which a command is stale

# Jobs of one namespace that may wait in one pool, unless an administrator says otherwise (SetNamespaceLimits). A fuse against a publisher that has run wild,
# not a policy: twice the 100,000 that a pool is built to carry, which no lab's sweep comes near.
QUEUED_MAX: Final = 200_000

# The brake (DESIGN.md §5): more than 30 % of nodes and at least five within 30 s, or more than 10 % of live attempts and at least five.
BRAKE_WINDOW_MS: Final = 30_000
BRAKE_COUNT_MIN: Final = 5
BRAKE_NODES_SHARE_PERCENT: Final = 30
BRAKE_ATTEMPTS_SHARE_PERCENT: Final = 10
BRAKE_KEPT_MAX: Final = 4_096  # far above what a pool of 10,000 nodes needs to cross its share

PRIORITY_POINT_MS: Final = 600_000  # of waiting: a job of priority 6 goes before one of priority 0 that came up to an hour earlier
PRIORITY_MAX: Final = 1_000  # either way; worth a week

# Bounds of one step: what is left over is taken up by the next input, a tick at the latest.
TIMERS_PER_STEP_MAX: Final = 64
FITS_PER_STEP_MAX: Final = 32
KINDS_PER_STEP_MAX: Final = 8_000  # of nodes that are looked at for gangs; about ten milliseconds
ENDED_KEPT_MAX: Final = 256  # reported ends a node remembers until a heartbeat no longer lists them; a node ends far fewer in two seconds
COMMANDS_PER_STEP_MAX: Final = 256  # then no further gang is placed in this step: each command repeats its manifest
REASONS_PER_STEP_MAX: Final = 64
