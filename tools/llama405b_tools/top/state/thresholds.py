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

# GPUs, against the median of all that report
FEW = 4  # GPUs that must report before one can deviate
LOW_POWER, LOW_CLOCK = 0.75, 0.9  # of the median
HOT_C, HOTTER_C = 80, 8  # and this much above the median
BUSY = 0.4  # median power over limit; below it all GPUs idle together (an offloaded optimizer, a checkpoint)
IDLE = 0.35  # power over limit of a waiting GPU: a sign of a hang
SMI_HUNG_S = 10.0  # nvidia-smi without an answer
SMI_RETRY_S = 30.0  # and until it is started again: without persistence mode an answer may take half of it

# a host's memory and counters
LOW_RAM = 0.03  # of all
COUNTERS_S = 600.0  # errors are counted over this time

# steps, against the median of those before
RECENT_STEPS = 20  # of which the shown median is taken
HIGH_LOSS, HIGH_LOSS_STEPS = 3.0, 20  # times the median, for this many steps
SLOW_STEP, SLOW_STEPS = 2.0, 10  # times the median, for this many steps
SLOW_S = 10.0  # and seconds: a busy laptop is no news
SLOW_RANK, SLOW_PART = 2.0, 0.2  # times the median of the ranks, and at least this share of a step more

# heartbeats
HANG_STEPS = 5  # times the median step, and at least --hang-after: a hang
LONG_SILENCE = 5  # times the silence of a hang: after that, log lines are no excuse
STALL_STEPS, STALL_S = 3, 15.0  # times the median step, and at least this long: not healthy, but not a hang yet
DISAGREE_STEPS, DISAGREE_S = 5, 30.0  # times the median step, and at least this long, between heartbeats and metrics

STAY_S = 60.0  # with a run that died, for its guard to restart it
