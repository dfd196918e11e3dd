// Where printf of device code goes.
#pragma once

#include <mutex>
#include <string>

namespace emulator {

struct Launch;

// What the CTAs of a launch have printed, each printf of a warp in one piece.
struct Console {
    std::mutex mutex;
    std::string text;
};

// Onto the launch's console, or to the host's standard output where it has none.
void print_on_console(const Launch& launch, const std::string& text);

}  // namespace emulator
