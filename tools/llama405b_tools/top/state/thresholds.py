"""All thresholds of cluster-top's judgments, with their units. Pure."""

# a host's frames and connection
STALE_FRAMES = 3  # intervals without a frame
FIRST_FRAME_S = 15.0  # to wait for the first one
QUIET_S, QUIET_FRAMES = 30.0, 10  # seconds and intervals without a frame, then cluster-top reconnects
MAX_QUIET_S = 600.0  # upper limit: it doubles each time, because a hung sampler may be left behind
DEAF_S = 60.0  # without input from cluster-top, then a sampler exits
PING_S = 10.0  # between keep-alives to a sampler
SLEPT_S = 30.0  # without processing events: this machine slept, or cluster-top was suspended
RECONNECT_S = 30.0  # for reconnecting after that

# GPUs, against the median of all of their model that have a rank and report
MIN_COMPARED = 4  # GPUs that must report before one can deviate
LOW_POWER, LOW_CLOCK = 0.75, 0.9  # of the median
HOT_C, HOTTER_C = 80, 8  # and this much above the median
TOO_HOT_C = 90  # whatever the median is
FOREIGN_MIB = 500  # of a GPU's memory, by a process that is not of the run
BUSY_POWER = 0.4  # median power over limit; below it all GPUs idle together (an offloaded optimizer, a checkpoint)
IDLE_POWER = 0.35  # power over limit of a waiting GPU: a sign of a hang
SMI_HUNG_S = 10.0  # nvidia-smi without an answer
SMI_RETRY_S = 30.0  # until it is restarted; without persistence mode, output may take half this long

# a host's memory and counters
LOW_RAM = 0.03  # of all
COUNTERS_S = 600.0  # errors are counted over this time
CPU_SLACK = 1.1  # times all cores: the kernel's CPU time counters are inexact

# GPUs, links and power of the whole run, against their own last minutes
LEVEL_S = 600.0
LEVEL_SAMPLES = 10  # before anything is judged
FALL_SHARE = 0.6  # of the median of that time
FALL_LENGTH_FACTOR = 1.5  # times the longest fall in that time, which a step or a save caused

# steps
RECENT_STEPS = 20  # steps of the shown median
MIN_PACE = 0.85  # of the expected pace; slower is not healthy
PACE_STEPS, PACE_S = 5, 60.0  # the last steps judged: at least this many, and this long
MIN_PACE_S = 10.0  # least duration, if an attempt has no more steps; shorter ones are noise
BLOCK_S, BLOCK_STEPS = 600.0, 20  # the best median of such blocks is the run's usual step time
HIGH_LOSS = ((10.0, 2), (3.0, 5), (1.5, 20))  # times its median, for this many steps
USUAL_LOSS_STEPS = 20  # before these, of which that median is taken
SLOW_RANK, SLOW_PART = 2.0, 0.2  # times the median of the ranks, and at least this share of a step more
BEHIND, BEHIND_S = 0.05, 0.1  # share of a step, and seconds, that the slowest rank computes longer than the median rank

# silence: of hangs and stalls, see run/hang.py
MOVED_BYTES = 1 << 20  # bytes a process must read or write between two frames to count as active

DISAGREE_STEPS, DISAGREE_S = 5, 30.0  # times the median step, and at least this long, between heartbeats and metrics

BLAME_DELAY_S = 10.0  # after a failure, before a host is blamed whose ranks only lost contact with others
RESTART_WAIT_S = 60.0  # to keep showing a run that died, so that its guard can restart it
