// What a traced launch sees: how often each byte of one tensor is read, and data races. A traced build is compiled with
// -fsanitize=thread, which makes the compiler call a function at every access to memory, and linked with these in place
// of ThreadSanitizer's: that knows OS threads, not barriers.
//
// Two accesses to a byte, one of them a write, by different threads are a race unless a barrier of the block lies
// between them or, within a warp, a collective of all its lanes. That holds for every order of the threads, so one run
// finds it. Shared memory and the tensors among the arguments are watched. Of the readers of a byte the last two are
// remembered; collectives of some lanes order nothing, and atomics are no accesses.
#include "trace.h"

#include <cstdio>
#include <vector>

namespace {

struct Access {
    cuda_cpu_position who;
    bool happened = false;
};

struct Byte {
    Access write, read, earlier_read;
};

struct Region {
    uintptr_t start;
    size_t bytes;
    int argument;  // -1: shared memory
    std::vector<Byte> shadow;
};

std::vector<Region> regions;  // the first one is shared memory
uintptr_t counted = 0;
size_t counted_bytes = 0;
unsigned char* read_counts = nullptr;

bool race(const Access& before, const cuda_cpu_position& now) {
    if (!before.happened) return false;
    const cuda_cpu_position& then = before.who;
    if (then.block != now.block) return true;
    if (then.thread == now.thread || then.barriers != now.barriers) return false;
    return then.thread / 32 != now.thread / 32 || then.warp_barriers == now.warp_barriers;
}

void fail(const Region& region, size_t offset, const Access& before, const char* what_before, const char* what) {
    char name[32] = "shared memory", message[256];
    if (region.argument >= 0) snprintf(name, sizeof name, "argument %d", region.argument);
    snprintf(message, sizeof message,
             "race: %s byte %zu of %s, which thread %d of block %u %s, with no barrier between", what, offset, name,
             before.who.thread, before.who.block, what_before);
    cuda_cpu_fail(message);
}

void access(const void* address, size_t bytes, bool write) {
    for (Region& region : regions) {
        const size_t offset = reinterpret_cast<uintptr_t>(address) - region.start;
        if (offset >= region.bytes) continue;
        const cuda_cpu_position now = cuda_cpu_here();
        for (size_t at = offset; at < offset + bytes && at < region.bytes; ++at) {
            Byte& byte = region.shadow[at];
            if (race(byte.write, now)) fail(region, at, byte.write, "wrote", write ? "writes" : "reads");
            if (write) {
                if (race(byte.read, now)) fail(region, at, byte.read, "read", "writes");
                if (race(byte.earlier_read, now)) fail(region, at, byte.earlier_read, "read", "writes");
                byte.write = {now, true};
            } else {
                const cuda_cpu_position& reader = byte.read.who;
                if (reader.thread != now.thread || reader.block != now.block) byte.earlier_read = byte.read;
                byte.read = {now, true};
            }
        }
        return;
    }
}

void read(const void* address, size_t bytes) {
    const size_t offset = reinterpret_cast<uintptr_t>(address) - counted;
    if (offset < counted_bytes)
        for (size_t at = offset; at < offset + bytes && at < counted_bytes; ++at)
            read_counts[at] += read_counts[at] < 255;
    access(address, bytes, false);
}

}  // namespace

// Before a launch: the tensors among its arguments, and the bytes whose reads are counted, up to 255 each.
extern "C" void cuda_cpu_trace(const uint64_t* starts, const uint64_t* bytes, const int* arguments, size_t count,
                               const void* watched, size_t watched_bytes, unsigned char* counts) {
    regions.assign(1, Region{0, 0, -1, {}});
    for (size_t at = 0; at < count; ++at)
        regions.push_back({starts[at], bytes[at], arguments[at], std::vector<Byte>(bytes[at])});
    counted = reinterpret_cast<uintptr_t>(watched);
    counted_bytes = watched_bytes;
    read_counts = counts;
}

extern "C" void cuda_cpu_trace_shared(const void* start, size_t bytes) {
    regions[0] = {reinterpret_cast<uintptr_t>(start), bytes, -1, std::vector<Byte>(bytes)};
}

#define TRACED(bytes)                                                                                   \
    extern "C" void __tsan_read##bytes(void* address) { read(address, bytes); }                         \
    extern "C" void __tsan_unaligned_read##bytes(void* address) { read(address, bytes); }               \
    extern "C" void __tsan_write##bytes(void* address) { access(address, bytes, true); }                \
    extern "C" void __tsan_unaligned_write##bytes(void* address) { access(address, bytes, true); }
TRACED(1)
TRACED(2)
TRACED(4)
TRACED(8)
TRACED(16)

extern "C" void __tsan_init() {}
extern "C" void __tsan_read_range(void* address, size_t bytes) { read(address, bytes); }
extern "C" void __tsan_write_range(void* address, size_t bytes) { access(address, bytes, true); }
extern "C" void __tsan_vptr_update(void**, void*) {}
