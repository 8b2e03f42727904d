// The functions that the kernels' tests call.
#include "execution.h"

extern "C" {

// Runs a kernel by its name, on memory of the host. Returns 0 on success; otherwise `problem` has the error.
int cuda_emulation_launch(const char* name, const unsigned grid[3], unsigned threads, size_t shared_bytes, void** arguments,
                          const size_t* sizes, size_t count, int order, int copies_arrive_at_once, char* problem, size_t room) {
    auto say = [&](const std::string& text) {
        strncpy(problem, text.c_str(), room - 1);
        problem[room - 1] = 0;
        return 1;
    };
    auto found = emulation::kernels().find(name);
    if (found == emulation::kernels().end()) return say("there is no kernel of this name");
    const emulation::Kernel& kernel = found->second;
    if (kernel.sizes != std::vector<size_t>(sizes, sizes + count)) return say("the arguments are not those that the kernel takes");
    emulation::Schedule schedule{static_cast<emulation::Order>(order), copies_arrive_at_once != 0};
    std::string text = emulation::launch(kernel, {grid[0], grid[1], grid[2]}, threads, shared_bytes, arguments, schedule);
    return text.empty() ? 0 : say(text);
}

}
