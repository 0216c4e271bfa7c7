"""From when on something stands out: every threshold of cluster-top, with its unit. Pure."""

# a host's frames and connection
STALE_FRAMES = 3  # intervals without a frame
FIRST_FRAME_S = 15.0  # to wait for the first one
QUIET_S, QUIET_FRAMES = 30.0, 10  # seconds and intervals without a frame: then the connection is made again
QUIET_MOST_S = 600.0  # at most: it is twice as long each time, because a sampler that hangs may stay behind
DEAF_S = 60.0  # without a sign of life from cluster-top: then a sampler ends
PING_S = 10.0  # between those
SLEPT_S = 30.0  # without looking at anything: this machine slept, or cluster-top was suspended
RECONNECT_S = 30.0  # for connections to be made again after that

# GPUs, against the median of all of their model that have a rank and report
FEW = 4  # GPUs that must report before one can deviate
LOW_POWER, LOW_CLOCK = 0.75, 0.9  # of the median
HOT_C, HOTTER_C = 80, 8  # and this much above the median
TOO_HOT_C = 90  # whatever the others do
FOREIGN_MIB = 500  # of a GPU's memory, by a process that is not of the run
BUSY = 0.4  # median power over limit; below it all GPUs idle together (an offloaded optimizer, a checkpoint)
IDLE = 0.35  # power over limit of a waiting GPU: a sign of a hang
SMI_HUNG_S = 10.0  # nvidia-smi without an answer
SMI_RETRY_S = 30.0  # and until it is started again: without persistence mode an answer may take half of it

# a host's memory and counters
LOW_RAM = 0.03  # of all
COUNTERS_S = 600.0  # errors are counted over this time
SLACK = 1.1  # times all cores: the kernel's counters of CPU time are not exact

# GPUs, links and power of the whole run, against their own last minutes
LEVEL_S = 600.0
LEVEL_SAMPLES = 10  # before anything is judged
FALLEN = 0.6  # of the median of that time
LONGER = 1.5  # times the longest fall in that time: longer than what every step, or a save, does to them

# steps
RECENT_STEPS = 20  # of which the shown median is taken
PACE = 0.85  # of the expected pace; slower is not healthy
PACE_STEPS, PACE_S = 5, 60.0  # the last steps that are judged: so many, and so long
PACE_LEAST_S = 10.0  # or as long as this, if an attempt has no more: a busy laptop is no news
BLOCK_S, BLOCK_STEPS = 600.0, 20  # the median of which is a run's usual step
HIGH_LOSS = ((10.0, 2), (3.0, 5), (1.5, 20))  # times its median, for this many steps
USUAL_LOSS_STEPS = 20  # before these, of which that median is taken
SLOW_RANK, SLOW_PART = 2.0, 0.2  # times the median of the ranks, and at least this share of a step more
BEHIND, BEHIND_S = 0.05, 0.1  # share of a step, and seconds, that the slowest rank computes longer than the median rank

# silence: of hangs and stalls, see run/judge.py
MOVED_BYTES = 1 << 20  # that a process must have read or written between two looks to be at work

DISAGREE_STEPS, DISAGREE_S = 5, 30.0  # times the median step, and at least this long, between heartbeats and metrics

BLAME_S = 10.0  # after a failure, until a host is blamed where a rank only lost contact with another
STAY_S = 60.0  # with a run that died, for its guard to restart it
