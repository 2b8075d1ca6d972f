// Runs the threads of a kernel that was compiled with cuda_cpu.h, and checks what they do at barriers and collectives.
#include "cuda_cpu.h"
#include "trace.h"

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include <link.h>
#include <sys/mman.h>

#ifndef __x86_64__
#include <ucontext.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// The dynamic shared memory, defined by the runner under the name that the kernel gives it; null where it has none.
extern "C" unsigned char* cuda_cpu_dynamic_shared();

namespace cuda_cpu {

constexpr size_t SHARED_LIMIT = 48 * 1024;       // of static and dynamic shared memory, without opting in to more
constexpr size_t DYNAMIC_CAPACITY = 64 * 1024;   // of the runner's array: the limit and a red zone
constexpr unsigned char GARBAGE = 0xFE;          // a large negative int, a large negative float
constexpr unsigned char CANARY = 0xC5;
constexpr int MAX_THREADS = 1024;
constexpr size_t MAX_MASKS = 64;  // in a warp
#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 * 1024;  // red zones make frames large
#else
constexpr size_t STACK_BYTES = 64 * 1024;
#endif
constexpr size_t GUARD_BYTES = 4096;

// ---------------------------------------------------------------------------------------------------------------------
// Contexts
// ---------------------------------------------------------------------------------------------------------------------

#ifdef __x86_64__
using Context = void*;  // a stack pointer; the callee-saved registers lie on the stack
extern "C" void cuda_cpu_switch(Context* save, Context load);
asm(R"(
.text
.globl cuda_cpu_switch
.hidden cuda_cpu_switch
.type cuda_cpu_switch, @function
cuda_cpu_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size cuda_cpu_switch, . - cuda_cpu_switch
)");
void switch_context(Context& save, Context& load) { cuda_cpu_switch(&save, load); }
void start_context(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>(stack + STACK_BYTES);
    *--top = nullptr;  // where a return address would lie: keeps the stack aligned as after a call
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    context = top;
}
#else
using Context = ucontext_t;
void switch_context(Context& save, Context& load) { swapcontext(&save, &load); }
void start_context(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Threads, warps, the block
// ---------------------------------------------------------------------------------------------------------------------

enum class State : unsigned char { READY, AT_BARRIER, IN_COLLECTIVE, EXITED };

// A rendezvous of the lanes of one mask. Two generations of results: a lane may leave one rendezvous and enter the next
// before the others have read theirs.
struct Collective {
    unsigned mask = 0;
    unsigned arrived = 0;
    unsigned generation = 0;
    Where where;
    unsigned predicate[2] = {0, 0};
    alignas(16) unsigned char value[2][32][16];
};

struct Warp {
    unsigned alive = 0;
    unsigned barriers = 0;  // collectives of all its lanes
    std::vector<Collective> collectives;  // one per mask in use
};

struct Fiber {
    Context context;
    char* stack = nullptr;
    uint3 index;
    int lane = 0;
    Warp* warp = nullptr;
    State state = State::READY;
    Collective* collective = nullptr;
    Where where;
#ifdef __SANITIZE_ADDRESS__
    void* fake_stack = nullptr;
#endif
};

struct Block {
    int threads = 0;
    int alive = 0;
    int at_barrier = 0;
    unsigned generation = 0;
    Where where;
    int count = 0;           // of true predicates, at the barrier that fills
    int result[2] = {0, 0};  // of the last two barriers
    int result_threads[2] = {0, 0};
    bool failed = false;
    char* message = nullptr;
    size_t message_size = 0;
};

Fiber fibers[MAX_THREADS];
Warp warps[MAX_THREADS / 32];
Block block;
Fiber* current = nullptr;
Context scheduler;
void (*kernel_call)() = nullptr;
#ifdef __SANITIZE_ADDRESS__
void* scheduler_fake_stack = nullptr;
const void* scheduler_stack = nullptr;
size_t scheduler_stack_size = 0;
#endif

void yield_to_scheduler(bool last = false) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(last ? nullptr : &current->fake_stack, scheduler_stack, scheduler_stack_size);
#endif
    switch_context(current->context, scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(current->fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
    (void)last;
}

void describe(const char* format, va_list arguments) {
    int used = snprintf(block.message, block.message_size, "block (%u, %u, %u)", blockIdx.x, blockIdx.y, blockIdx.z);
    if (current)
        used += snprintf(block.message + used, block.message_size - used, ", thread (%u, %u, %u)", current->index.x,
                         current->index.y, current->index.z);
    used += snprintf(block.message + used, block.message_size - used, ": ");
    vsnprintf(block.message + used, block.message_size - used, format, arguments);
    block.failed = true;
}

// Ends the launch: the scheduler returns the message, and no fiber runs again.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    describe(format, arguments);
    va_end(arguments);
    yield_to_scheduler(true);
    abort();
}

__attribute__((format(printf, 1, 2))) inline void report(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    describe(format, arguments);
    va_end(arguments);
}

const char* file_name(const Where& where) {
    const char* slash = strrchr(where.file_name(), '/');
    return slash ? slash + 1 : where.file_name();
}

bool same_place(const Where& a, const Where& b) {
    return a.line() == b.line() && a.column() == b.column() && !strcmp(a.file_name(), b.file_name());
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers and collectives
// ---------------------------------------------------------------------------------------------------------------------

void release_barrier() {
    const unsigned generation = block.generation++ & 1;
    block.result[generation] = block.count;
    block.result_threads[generation] = block.at_barrier;
    block.count = 0;
    block.at_barrier = 0;
    for (int thread = 0; thread < block.threads; ++thread)
        if (fibers[thread].state == State::AT_BARRIER) fibers[thread].state = State::READY;
}

Arrived barrier(bool predicate, const Where& where) {
    if (block.at_barrier == 0) block.where = where;
    if (!same_place(block.where, where))
        fail("divergent barrier: __syncthreads at %s:%u while other threads wait at %s:%u", file_name(where),
             where.line(), file_name(block.where), block.where.line());
    current->where = where;
    block.count += predicate;
    const unsigned generation = block.generation & 1;
    if (++block.at_barrier == block.alive) {
        release_barrier();
    } else {
        current->state = State::AT_BARRIER;
        yield_to_scheduler();
    }
    return {block.result_threads[generation], block.result[generation]};
}

Exchanged exchange(unsigned mask, const void* value, size_t bytes, bool predicate, const Where& where) {
    Warp& warp = *current->warp;
    const unsigned self = 1u << current->lane;
    if (!(mask & self))
        fail("mask %08x at %s:%u does not name the lane that uses it, %d", mask, file_name(where), where.line(),
             current->lane);
    if (mask & ~warp.alive)
        fail("mask %08x at %s:%u names exited or absent lanes %08x", mask, file_name(where), where.line(),
             mask & ~warp.alive);
    auto found = std::find_if(warp.collectives.begin(), warp.collectives.end(),
                              [&](const Collective& one) { return one.mask == mask; });
    if (found == warp.collectives.end()) {
        if (warp.collectives.size() == MAX_MASKS) fail("more than %zu different masks in a warp", MAX_MASKS);
        found = warp.collectives.emplace(found);
        found->mask = mask;
    }
    Collective& collective = *found;
    if (collective.arrived == 0) collective.where = where;
    if (!same_place(collective.where, where))
        fail("divergent collective: mask %08x at %s:%u while other lanes wait at %s:%u", mask, file_name(where),
             where.line(), file_name(collective.where), collective.where.line());
    const unsigned generation = collective.generation & 1;
    if (collective.arrived == 0) collective.predicate[generation] = 0;
    if (bytes) memcpy(collective.value[generation][current->lane], value, bytes);
    if (predicate) collective.predicate[generation] |= self;
    collective.arrived |= self;
    current->where = where;
    if (collective.arrived == mask) {
        collective.arrived = 0;
        ++collective.generation;
        warp.barriers += mask == warp.alive;
        Fiber* first = current - current->lane;
        for (int lane = 0; lane < 32; ++lane) {
            Fiber& fiber = first[lane];
            if ((mask >> lane & 1) && fiber.state == State::IN_COLLECTIVE && fiber.collective == &collective)
                fiber.state = State::READY;
        }
    } else {
        current->state = State::IN_COLLECTIVE;
        current->collective = &collective;
        yield_to_scheduler();
    }
    return {collective.value[generation], collective.predicate[generation]};
}

int lane() { return current->lane; }
unsigned lanes_alive() { return current->warp->alive; }
void let_others_run() { yield_to_scheduler(); }
void fail_shuffle(unsigned mask, int source, const Where& where) {
    fail("shuffle at %s:%u reads lane %d, which mask %08x does not name", file_name(where), where.line(), source, mask);
}

// ---------------------------------------------------------------------------------------------------------------------
// Scheduling
// ---------------------------------------------------------------------------------------------------------------------

void fiber_entry() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    kernel_call();
    current->state = State::EXITED;
    current->warp->alive &= ~(1u << current->lane);
    if (--block.alive && block.at_barrier == block.alive) release_barrier();  // those that exited are not waited for
    yield_to_scheduler(true);
    abort();
}

void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = fiber.index;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, STACK_BYTES);
#endif
    switch_context(scheduler, fiber.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

class Random {  // splitmix64
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        return z ^ z >> 31;
    }

  private:
    uint64_t state_;
};

void report_deadlock() {
    int at_barrier = 0, in_collective = 0, exited = 0;
    const Fiber* one = nullptr;
    for (int thread = 0; thread < block.threads; ++thread) {
        const Fiber& fiber = fibers[thread];
        at_barrier += fiber.state == State::AT_BARRIER;
        in_collective += fiber.state == State::IN_COLLECTIVE;
        exited += fiber.state == State::EXITED;
        if (!one && fiber.state != State::EXITED) one = &fiber;
    }
    current = nullptr;
    report("deadlock: %d threads wait at __syncthreads, %d in a warp collective, %d have exited; thread %d waits at "
           "%s:%u",
           at_barrier, in_collective, exited, int(one - fibers), file_name(one->where), one->where.line());
}

void start_block(dim3 size) {
    block.threads = block.alive = size.x * size.y * size.z;
    block.at_barrier = block.count = 0;
    for (Warp& warp : warps) {
        warp.alive = warp.barriers = 0;
        warp.collectives.clear();
        warp.collectives.reserve(MAX_MASKS);  // fibers keep pointers to them
    }
    for (int thread = 0; thread < block.threads; ++thread) {
        Fiber& fiber = fibers[thread];
        if (!fiber.stack) {
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            void* memory = mmap(nullptr, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
            if (memory == MAP_FAILED) abort();
            mprotect(memory, GUARD_BYTES, PROT_NONE);
            fiber.stack = static_cast<char*>(memory) + GUARD_BYTES;
        }
        const unsigned t = thread;
        fiber.index = {t % size.x, t / size.x % size.y, t / (size.x * size.y)};
        fiber.lane = thread % 32;
        fiber.warp = &warps[thread / 32];
        fiber.warp->alive |= 1u << fiber.lane;
        fiber.state = State::READY;
        start_context(fiber.context, fiber.stack, fiber_entry);
    }
}

void run_block(uint64_t schedule) {
    Random random(schedule * 0x2545F4914F6CDD1Dull + blockIdx.x + 7919ull * blockIdx.y + 104729ull * blockIdx.z);
    int order[MAX_THREADS];
    for (int thread = 0; thread < block.threads; ++thread) order[thread] = thread;
    while (block.alive) {
        bool progress = false, passed_over = false;
        if (schedule)
            for (int left = block.threads; left > 1; --left) std::swap(order[left - 1], order[random.next() % left]);
        for (int at = 0; at < block.threads; ++at) {
            Fiber& fiber = fibers[order[at]];
            if (fiber.state != State::READY) continue;
            if (schedule && random.next() % 4 == 0) {
                passed_over = true;
                continue;
            }
            resume(fiber);
            if (block.failed) return;
            progress = true;
        }
        if (!progress && !passed_over) return report_deadlock();
    }
    current = nullptr;
}

// ---------------------------------------------------------------------------------------------------------------------
// Shared memory
// ---------------------------------------------------------------------------------------------------------------------

struct SharedSegment {
    unsigned char* start = nullptr;
    size_t bytes = 0;
};

// As the linker passes it to __tls_get_addr.
struct Module {
    unsigned long id, offset;
};

extern "C" void* __tls_get_addr(Module*);

// The thread-local segment of the library that holds this function.
SharedSegment shared_segment() {
    SharedSegment segment;
    dl_iterate_phdr(
        [](dl_phdr_info* module, size_t, void* out) {
            const auto self = reinterpret_cast<uintptr_t>(&cuda_cpu_dynamic_shared);
            const ElfW(Phdr)* tls = nullptr;
            bool mine = false;
            for (int at = 0; at < module->dlpi_phnum; ++at) {
                const ElfW(Phdr)& header = module->dlpi_phdr[at];
                const uintptr_t start = module->dlpi_addr + header.p_vaddr;
                mine |= header.p_type == PT_LOAD && start <= self && self < start + header.p_memsz;
                if (header.p_type == PT_TLS) tls = &header;
            }
            if (!mine) return 0;
            // Asking for an address makes the segment, which a library has only once it is used.
            Module first = {module->dlpi_tls_modid, 0};
            auto& segment = *static_cast<SharedSegment*>(out);
            if (tls) segment = {static_cast<unsigned char*>(__tls_get_addr(&first)), tls->p_memsz};
            return 1;
        },
        &segment);
    return segment;
}

void fill_shared(const SharedSegment& segment, unsigned char* dynamic, size_t dynamic_bytes) {
#ifdef __SANITIZE_ADDRESS__
    if (dynamic) ASAN_UNPOISON_MEMORY_REGION(dynamic, DYNAMIC_CAPACITY);
#endif
    if (segment.start) memset(segment.start, GARBAGE, segment.bytes);
    if (!dynamic) return;
#ifdef __SANITIZE_ADDRESS__
    ASAN_POISON_MEMORY_REGION(dynamic + dynamic_bytes, DYNAMIC_CAPACITY - dynamic_bytes);
#else
    memset(dynamic + dynamic_bytes, CANARY, DYNAMIC_CAPACITY - dynamic_bytes);
#endif
}

void check_canary([[maybe_unused]] const unsigned char* dynamic, [[maybe_unused]] size_t dynamic_bytes) {
#ifndef __SANITIZE_ADDRESS__
    if (!dynamic || block.failed) return;
    for (size_t at = dynamic_bytes; at < DYNAMIC_CAPACITY; ++at)
        if (dynamic[at] != CANARY)
            return report("a write at byte %zu of %zu bytes of dynamic shared memory", at, dynamic_bytes);
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// Launch
// ---------------------------------------------------------------------------------------------------------------------

constexpr int MAX_ARGUMENTS = 40;
const uint64_t* arguments = nullptr;

// Pointers and int32 each take a 64-bit slot of the calling convention, so one function type serves all kernels.
template <size_t... at>
void call(void (*kernel)(), std::index_sequence<at...>) {
    reinterpret_cast<void (*)(decltype(uint64_t(at))...)>(kernel)(arguments[at]...);
}

extern "C" void cuda_cpu_kernel();  // the linker makes it another name of the kernel

template <size_t count>
void call_kernel() { call(cuda_cpu_kernel, std::make_index_sequence<count>{}); }

template <size_t... count>
void choose_call(size_t wanted, std::index_sequence<count...>) {
    ((wanted == count ? void(kernel_call = call_kernel<count>) : void()), ...);
}

#ifndef __SANITIZE_ADDRESS__
// A fault of memory ends the launch, not the process. The handler has a stack of its own: the fiber's may be full.
class FaultCatcher {
  public:
    FaultCatcher() {
        stack_t own{};
        own.ss_sp = stack_;
        own.ss_size = sizeof stack_;
        sigaltstack(&own, &old_stack_);
        struct sigaction action {};
        action.sa_handler = [](int signal) { siglongjmp(environment, signal); };
        action.sa_flags = SA_ONSTACK;
        for (int at = 0; at < 3; ++at) sigaction(SIGNALS[at], &action, &old_actions_[at]);
    }
    ~FaultCatcher() {
        for (int at = 0; at < 3; ++at) sigaction(SIGNALS[at], &old_actions_[at], nullptr);
        sigaltstack(&old_stack_, nullptr);
    }
    static inline sigjmp_buf environment;

  private:
    static constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGFPE};
    stack_t old_stack_;
    struct sigaction old_actions_[3];
    static inline char stack_[64 * 1024];
};
#endif

void run_grid(uint64_t schedule, size_t dynamic_bytes) {
    const SharedSegment segment = shared_segment();
    unsigned char* dynamic = cuda_cpu_dynamic_shared();
    const size_t static_bytes = segment.bytes - (dynamic ? DYNAMIC_CAPACITY : 0);
    if (static_bytes + dynamic_bytes > SHARED_LIMIT)
        return report("%zu bytes of static and %zu of dynamic shared memory exceed %zu", static_bytes, dynamic_bytes,
                      SHARED_LIMIT);
    if (dynamic_bytes && !dynamic)
        return report("%zu bytes of dynamic shared memory, and no array to use them", dynamic_bytes);
    for (unsigned z = 0; z < gridDim.z; ++z)
        for (unsigned y = 0; y < gridDim.y; ++y)
            for (unsigned x = 0; x < gridDim.x; ++x) {
                blockIdx = {x, y, z};
                fill_shared(segment, dynamic, dynamic_bytes);
                start_block(blockDim);
                if (cuda_cpu_trace_shared) cuda_cpu_trace_shared(segment.start, segment.bytes);
                run_block(schedule);
                check_canary(dynamic, dynamic_bytes);
                if (block.failed) return;
            }
}

}  // namespace cuda_cpu

cuda_cpu_position cuda_cpu_here() {
    using namespace cuda_cpu;
    const unsigned block_index = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    return {int(current - fibers), block_index, block.generation, current->warp->barriers};
}

void cuda_cpu_fail(const char* message) { cuda_cpu::fail("%s", message); }

// Gives the fibers' stacks back, which are kept from launch to launch: with their guards they are two mappings a thread,
// of which a process may have 65,530.
extern "C" void cuda_cpu_release() {
    for (cuda_cpu::Fiber& fiber : cuda_cpu::fibers) {
        if (!fiber.stack) continue;
        munmap(fiber.stack - cuda_cpu::GUARD_BYTES, cuda_cpu::GUARD_BYTES + cuda_cpu::STACK_BYTES);
        fiber.stack = nullptr;
    }
}

// Returns 0, or 1 with a message. Arguments are addresses, or int32 values in the low half.
extern "C" int cuda_cpu_launch(
    const unsigned* grid, const unsigned* threads, size_t dynamic_bytes, const uint64_t* arguments, size_t count,
    uint64_t schedule, char* message, size_t message_size) {
    using namespace cuda_cpu;
    block = Block{};
    block.message = message;
    block.message_size = message_size;
    current = nullptr;
    gridDim = dim3(grid[0], grid[1], grid[2]);
    blockDim = dim3(threads[0], threads[1], threads[2]);
    blockIdx = {0, 0, 0};
    cuda_cpu::arguments = arguments;
    kernel_call = nullptr;
    choose_call(count, std::make_index_sequence<MAX_ARGUMENTS + 1>{});
    const uint64_t block_size = uint64_t(threads[0]) * threads[1] * threads[2];
    if (!kernel_call) {
        report("%zu arguments exceed %d", count, MAX_ARGUMENTS);
    } else if (block_size == 0 || block_size > MAX_THREADS) {
        report("%llu threads in a block, expected 1 to %d", (unsigned long long)block_size, MAX_THREADS);
    } else {
#ifdef __SANITIZE_ADDRESS__
        run_grid(schedule, dynamic_bytes);
#else
        FaultCatcher catcher;
        const int signal = sigsetjmp(FaultCatcher::environment, 1);
        if (signal == 0)
            run_grid(schedule, dynamic_bytes);
        else
            report("%s: an address that is not mapped or not aligned, or a stack over %zu bytes", strsignal(signal),
                   STACK_BYTES);
#endif
    }
    return block.failed;
}
