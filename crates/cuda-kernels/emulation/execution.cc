// The scheduler of execution.h.
#include "execution.h"

#include <signal.h>
#include <sys/mman.h>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {

bool (*is_memory)(uint64_t, size_t) = nullptr;
namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t STACK_BYTES = 512 << 10; // with room around each variable
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr unsigned LANES = 32;
constexpr size_t MARGIN = 4 << 10; // before shared memory
constexpr size_t PAGE = 64 << 10; // the largest of a host
constexpr size_t MAX_SHARED_BYTES = 256 << 10;

// These objects are never destroyed: a thread may be in a launch when another one ends the process.
// There are as many fibres as any launch had threads, so stacks are made once.
std::vector<Fibre>& fibres = *new std::vector<Fibre>;
unsigned thread_count; // of this launch
unsigned running;
std::string& problem = *new std::string;
unsigned char* shared; // of this launch
size_t shared_bytes_now, block_now;
Schedule now;
const Kernel* kernel_now;
void** arguments_now;
thread_local bool is_in_kernel;

// The end of the memory that shared memory is a part of. No byte behind it can be read or written.
unsigned char* end_of_shared_memory() {
    static unsigned char* end = [] {
        void* all = mmap(nullptr, MAX_SHARED_BYTES + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED) abort();
        unsigned char* end = static_cast<unsigned char*>(all) + MAX_SHARED_BYTES + PAGE;
        if (mprotect(end, PAGE, PROT_NONE) != 0) abort();
        return end;
    }();
    return end;
}

// Whether these bytes still are those of memory that was not written.
bool is_untouched(const unsigned char* from, const unsigned char* end) {
    return from == end || (*from == 0xFF && memcmp(from, from + 1, size_t(end - from) - 1) == 0);
}

// A kernel that reads or writes a page that it may not gets an error. Every other bad access is left to the handler from before.
struct sigaction before;
void on_bad_access(int, siginfo_t*, void*) {
    if (is_in_kernel) fail("memory outside of its buffers is read or written");
    sigaction(SIGSEGV, &before, nullptr);
}
void handle_bad_accesses() {
    static const bool is_done = [] {
        struct sigaction handler = {};
        handler.sa_sigaction = on_bad_access;
        // The handler leaves the fibre, and never returns: its signal must not stay blocked.
        handler.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
        return sigaction(SIGSEGV, &handler, &before) == 0;
    }();
    if (!is_done) abort();
}

void body() {
    kernel_now->run(arguments_now);
    fibres[running].at = At::Ended;
}

#if defined(__x86_64__)
// Saves the callee-saved registers on the current stack, and restores them from the other stack.
extern "C" void emulation_switch(void** from, void* to);
__asm__(".text\n"
        ".globl emulation_switch\n"
        "emulation_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        // Not `ret`: processors predict that a return goes to the latest call, which was made on the other stack.
        "  popq %rcx\n  jmp *%rcx\n");
void* scheduler;
void leave() { emulation_switch(&fibres[running].stack_pointer, scheduler); }
void enter(Fibre& fibre) { emulation_switch(&scheduler, fibre.stack_pointer); }
void start() {
    body();
    leave();
    abort();
}
void prepare(Fibre& fibre) {
    auto end = reinterpret_cast<uintptr_t>(fibre.stack.get() + STACK_BYTES) & ~uintptr_t(15);
    void** top = reinterpret_cast<void**>(end);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(start);
    for (int saved = 0; saved < 6; saved++) *--top = nullptr;
    fibre.stack_pointer = top;
}
#else
// Costs a system call for each switch, and works on every processor.
ucontext_t scheduler;
std::vector<ucontext_t> contexts;
void leave() { swapcontext(&contexts[running], &scheduler); }
void enter(Fibre& fibre) { swapcontext(&scheduler, &contexts[&fibre - fibres.data()]); }
void start() {
    body();
    leave();
    abort();
}
void prepare(Fibre& fibre) {
    contexts.resize(fibres.size());
    ucontext_t& context = contexts[&fibre - fibres.data()];
    getcontext(&context);
    context.uc_stack.ss_sp = fibre.stack.get();
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, start, 0);
}
#endif

// Runs each ready fibre of one warp once, as far as it gets. Returns whether the warp can then continue.
bool run_warp(unsigned warp) {
    unsigned from = warp * LANES, to = std::min(from + LANES, thread_count);
    for (unsigned k = 0; k < to - from && problem.empty(); k++) {
        running = now.order == Order::LastFirst ? to - 1 - k : from + k;
        Fibre& fibre = fibres[running];
        if (fibre.at != At::Running) continue;
        threadIdx = {running, 0, 0};
        enter(fibre);
    }
    if (!problem.empty()) return false;
    unsigned waiting = 0, line = 0;
    for (unsigned i = from; i < to; i++) {
        if (fibres[i].at != At::Warp) continue;
        if (waiting++ > 0 && fibres[i].line != line) {
            problem = "threads of a warp wait at different places";
            return false;
        }
        line = fibres[i].line;
    }
    if (waiting == 0) return false;
    if (waiting < LANES) {
        problem = "a part of a warp waits for the rest of it";
        return false;
    }
    for (unsigned i = from; i < to; i++) fibres[i].at = At::Running;
    return true;
}

void run_block(unsigned threads, unsigned seed) {
    for (unsigned i = 0; i < threads; i++) {
        Fibre& fibre = fibres[i];
        fibre.at = At::Running;
        fibre.barriers = fibre.warp_barriers = 0;
        if (fibre.copies.size() != 1 || !fibre.copies[0].empty()) fibre.copies.assign(1, {});
        prepare(fibre);
    }
    std::mt19937 random(seed);
    const unsigned warps = (threads + LANES - 1) / LANES;
    // Warps that can continue, in ascending order.
    std::vector<unsigned> ready;
    auto all_are_ready = [&] {
        for (unsigned warp = 0; warp < warps; warp++) ready.push_back(warp);
    };
    all_are_ready();
    while (problem.empty()) {
        if (!ready.empty()) {
            const size_t last = ready.size() - 1;
            const size_t at = now.order == Order::Random ? random() % ready.size() : now.order == Order::LastFirst ? last : 0;
            if (!run_warp(ready[at])) ready.erase(ready.begin() + long(at));
            continue;
        }
        unsigned ended = 0, at_barrier = 0;
        for (unsigned i = 0; i < threads; i++) ended += fibres[i].at == At::Ended, at_barrier += fibres[i].at == At::Barrier;
        if (ended == threads) return;
        if (at_barrier != threads) {
            problem = "some threads of a block ended while others wait at a barrier";
            return;
        }
        for (unsigned i = 0; i < threads; i++) {
            if (fibres[i].line != fibres[0].line) {
                problem = "threads of a block wait at different barriers";
                return;
            }
            fibres[i].at = At::Running;
        }
        all_are_ready();
    }
}

} // namespace

void wait(At at, unsigned line) {
    Fibre& fibre = fibres[running];
    fibre.at = at;
    fibre.line = line;
    leave();
}

void fail(const std::string& what) {
    problem = what;
    leave();
    abort();
}

unsigned char* shared_memory() { return shared; }
size_t shared_bytes() { return shared_bytes_now; }
size_t block_number() { return block_now; }
const std::string& kernel_name() { return kernel_now->name; }
Fibre& self() { return fibres[running]; }
Fibre& peer(int lane) { return fibres[(running & ~(LANES - 1)) + lane]; }
Schedule schedule() { return now; }

std::map<std::string, Kernel>& kernels() {
    static auto* all = new std::map<std::string, Kernel>;
    return *all;
}

std::string launch(const Kernel& kernel, dim3 grid, unsigned threads, size_t shared_bytes, void** arguments, Schedule schedule) {
    if (threads == 0 || threads > kernel.max_threads)
        return "expected 1 to " + std::to_string(kernel.max_threads) + " threads a block, got " + std::to_string(threads);
    if (shared_bytes > MAX_SHARED_BYTES) return "no card has " + std::to_string(shared_bytes) + " bytes of shared memory for a block";
    handle_bad_accesses();
    kernel_now = &kernel;
    arguments_now = arguments;
    now = schedule;
    problem.clear();
    gridDim = grid;
    blockDim = {threads, 1, 1};
    thread_count = threads;
    shared_bytes_now = shared_bytes;
    if (fibres.size() < threads) fibres.resize(threads);
    for (unsigned i = 0; i < threads; i++)
        if (!fibres[i].stack) fibres[i].stack.reset(new unsigned char[STACK_BYTES]);
    // As near to the end as an address that is a multiple of 16 and not of 32 allows.
    unsigned char* end = end_of_shared_memory();
    shared = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(end - shared_bytes) - 16) / 32 * 32 + 16);
    size_t blocks = size_t(grid.x) * grid.y * grid.z;
    std::vector<size_t> order(blocks);
    for (size_t i = 0; i < blocks; i++) order[i] = schedule.order == Order::LastFirst ? blocks - 1 - i : i;
    if (schedule.order == Order::Random) std::shuffle(order.begin(), order.end(), std::mt19937(blocks));
    for (size_t block : order) {
        blockIdx = {unsigned(block % grid.x), unsigned(block / grid.x % grid.y), unsigned(block / grid.x / grid.y)};
        memset(shared - MARGIN, 0xFF, size_t(end - shared) + MARGIN);
        block_now++;
        is_in_kernel = true;
        run_block(threads, unsigned(block));
        is_in_kernel = false;
        if (problem.empty() && !(is_untouched(shared - MARGIN, shared) && is_untouched(shared + shared_bytes, end)))
            problem = "a block has written outside of its shared memory";
        if (!problem.empty()) return problem;
    }
    return "";
}

} // namespace emulation
