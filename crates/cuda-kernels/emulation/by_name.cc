// The functions that the kernels' tests call.
//
// LOW_MEM_T5_CHANGED_KERNELS is a library of kernels: each replaces the kernel of its name.
#include <dlfcn.h>
#include <stdio.h>

#include "execution.h"

namespace {

void load_changed_kernels() {
    static const bool is_done = [] {
        const char* library = getenv("LOW_MEM_T5_CHANGED_KERNELS");
        // A library registers its kernels when it is loaded.
        if (!library || dlopen(library, RTLD_NOW)) return true;
        fprintf(stderr, "LOW_MEM_T5_CHANGED_KERNELS: %s\n", dlerror());
        return false;
    }();
    if (!is_done) abort();
}

} // namespace

extern "C" {

// Runs a kernel by its name, on memory of the host. Returns 0 on success; otherwise `problem` has the error.
int cuda_emulation_launch(const char* name, const unsigned grid[3], unsigned threads, size_t shared_bytes, void** arguments,
                          const size_t* sizes, size_t count, int order, int copies_arrive_at_once, char* problem, size_t room) {
    auto say = [&](const std::string& text) {
        strncpy(problem, text.c_str(), room - 1);
        problem[room - 1] = 0;
        return 1;
    };
    load_changed_kernels();
    auto found = emulation::kernels().find(name);
    if (found == emulation::kernels().end()) return say("there is no kernel of this name");
    const emulation::Kernel& kernel = found->second;
    if (kernel.sizes != std::vector<size_t>(sizes, sizes + count)) return say("the arguments are not those that the kernel takes");
    emulation::Schedule schedule{static_cast<emulation::Order>(order), copies_arrive_at_once != 0};
    std::string text = emulation::launch(kernel, {grid[0], grid[1], grid[2]}, threads, shared_bytes, arguments, schedule);
    return text.empty() ? 0 : say(text);
}

}
