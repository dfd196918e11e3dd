// The destination of printf in device code.
#pragma once

#include <mutex>
#include <string>

namespace emulator {

struct Launch;

// The text that the CTAs of a launch have printed. The output of one printf of a warp is contiguous.
struct Console {
    std::mutex mutex;
    std::string text;
};

// Prints to the launch's console, or to the host's standard output if it has none.
void print_on_console(const Launch& launch, const std::string& text);

}  // namespace emulator
