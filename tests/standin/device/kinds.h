// What is counted. The last three are what the checks found.
#pragma once

enum { EVENT_SYNC, STREAM_SYNC, DEVICE_SYNC, BLOCKING_COPY, PAGEABLE_DOWN, PAGEABLE_UP, HOST_ALLOC, HOST_REGISTER, DEVICE_ALLOC,
       DEVICE_FREE, KERNEL, COPY, COLLECTIVE, EVENT_WAIT, COMMUNICATOR, CONTEXT, TOUCHED, CHANGED, RACE, KINDS };
[[maybe_unused]] static const char* NAMES[] = {
    "event_sync", "stream_sync", "device_sync", "blocking_copy", "pageable_down", "pageable_up", "host_alloc", "host_register",
    "device_alloc", "device_free", "kernel", "copy", "collective", "event_wait", "communicator", "context", "touched", "changed", "race"};
