#include "console.h"

#include <cstdio>

#include "machine.h"

namespace emulator {

void print_on_console(const Launch& launch, const std::string& text) {
    if (launch.console == nullptr) {
        std::fwrite(text.data(), 1, text.size(), stdout);
        std::fflush(stdout);
        return;
    }
    const std::lock_guard lock(launch.console->mutex);
    launch.console->text += text;
}

}  // namespace emulator
