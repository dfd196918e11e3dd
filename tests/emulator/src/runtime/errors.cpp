#include "errors.h"

#include <mutex>
#include <set>
#include <sstream>
#include <utility>

#include "exports.h"

namespace emulator::runtime {
namespace {

struct LastError {
    cudaError_t code = cudaSuccess, code_of_reason = cudaSuccess;
    std::string reason;
};
thread_local LastError last;

std::mutex mutex;
std::optional<Fault> last_fault;
std::vector<std::string> failures;
std::set<std::string> warnings;
constexpr size_t kMostFailures = 1000;

struct Known {
    cudaError_t code;
    const char *name, *text;
};

#define EMULATOR_ERROR(code, text) \
    Known {                        \
        code, #code, text          \
    }
// The errors that this runtime returns, with CUDA's texts.
constexpr Known kKnown[] = {
    EMULATOR_ERROR(cudaSuccess, "no error"),
    EMULATOR_ERROR(cudaErrorInvalidValue, "invalid argument"),
    EMULATOR_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    EMULATOR_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    EMULATOR_ERROR(cudaErrorInvalidSymbol, "invalid device symbol"),
    EMULATOR_ERROR(cudaErrorInvalidDeviceFunction, "invalid device function"),
    EMULATOR_ERROR(cudaErrorMissingConfiguration, "__global__ function call is not configured"),
    EMULATOR_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    EMULATOR_ERROR(cudaErrorInvalidKernelImage, "device kernel image is invalid"),
    EMULATOR_ERROR(cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"),
    EMULATOR_ERROR(cudaErrorInvalidPtx, "a PTX JIT compilation failed"),
    EMULATOR_ERROR(cudaErrorSymbolNotFound, "named symbol not found"),
    EMULATOR_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    EMULATOR_ERROR(cudaErrorLaunchTimeout, "the launch timed out and was terminated"),
    EMULATOR_ERROR(cudaErrorMisalignedAddress, "misaligned address"),
    EMULATOR_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    EMULATOR_ERROR(cudaErrorNotSupported, "operation not supported"),
    EMULATOR_ERROR(cudaErrorInvalidClusterSize, "Cluster size is invalid"),
    EMULATOR_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    EMULATOR_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    EMULATOR_ERROR(cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"),
    EMULATOR_ERROR(cudaErrorPeerAccessUnsupported, "peer access is not supported between these two devices"),
    EMULATOR_ERROR(cudaErrorCapturedEvent, "operation not permitted on an event last recorded in a capturing stream"),
    EMULATOR_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    EMULATOR_ERROR(cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"),
    EMULATOR_ERROR(cudaErrorStreamCaptureMerge, "operation would result in a merge of separate capture sequences"),
    EMULATOR_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    EMULATOR_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    EMULATOR_ERROR(cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"),
    EMULATOR_ERROR(cudaErrorStreamCaptureImplicit,
                   "operation would make the legacy stream depend on a capturing blocking stream"),
    EMULATOR_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef EMULATOR_ERROR

const Known* find(cudaError_t code) {
    for (const Known& known : kKnown) {
        if (known.code == code) return &known;
    }
    return nullptr;
}

cudaError_t code_of(const std::string& kind) {
    if (kind == "syntax" || kind == "unsupported") return cudaErrorInvalidPtx;
    if (kind == "arguments") return cudaErrorInvalidValue;
    if (kind == "out-of-bounds") return cudaErrorIllegalAddress;
    if (kind == "misaligned") return cudaErrorMisalignedAddress;
    if (kind == "deadlock" || kind == "limit") return cudaErrorLaunchTimeout;
    return cudaErrorLaunchFailure;
}

// Returns a message with everything that a Fault contains.
std::string text_of(const Fault& fault) {
    std::ostringstream text;
    text << fault.kind << ": " << fault.what();
    const Place& place = fault.place;
    const auto triple = [&](const char* name, const int (&index)[3]) {
        if (index[0] >= 0) text << ", " << name << " (" << index[0] << ", " << index[1] << ", " << index[2] << ')';
    };
    if (!place.kernel.empty()) text << "; kernel " << place.kernel;
    if (place.line >= 0) text << ", PTX line " << place.line << ": " << place.text;
    if (!place.source.empty()) text << ", source " << place.source;
    triple("CTA", place.cta);
    triple("thread", place.thread);
    return text.str();
}

}  // namespace

cudaError_t fail(cudaError_t code, const std::string& reason) {
    last = {code, code, reason};
    const std::lock_guard lock(mutex);
    if (failures.size() < kMostFailures) {
        failures.push_back(std::string(cudaGetErrorName(code)) + (reason.empty() ? "" : ": " + reason));
    }
    return code;
}

std::vector<std::string> take_failures() {
    const std::lock_guard lock(mutex);
    return std::exchange(failures, {});
}

void warn(const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.insert(text);
}

std::set<std::string> take_warnings() {
    const std::lock_guard lock(mutex);
    return std::exchange(warnings, {});
}

cudaError_t fail(const Fault& fault) {
    {
        const std::lock_guard lock(mutex);
        last_fault = fault;
    }
    return fail(code_of(fault.kind), text_of(fault));
}

std::optional<Fault> fault_told_in(const std::string& message) {
    const std::lock_guard lock(mutex);
    if (!last_fault || message.find(text_of(*last_fault)) == std::string::npos) return std::nullopt;
    return last_fault;
}

}  // namespace emulator::runtime

using namespace emulator::runtime;

cudaError_t cudaGetLastError() {
    const cudaError_t code = last.code;
    last.code = cudaSuccess;  // the reason stays for cudaGetErrorString
    return code;
}

cudaError_t cudaPeekAtLastError() {
    return last.code;
}

const char* cudaGetErrorName(cudaError_t error) {
    const Known* known = find(error);
    return known == nullptr ? "unrecognized error code" : known->name;
}

const char* cudaGetErrorString(cudaError_t error) {
    if (error == last.code_of_reason && !last.reason.empty()) return last.reason.c_str();
    const Known* known = find(error);
    return known == nullptr ? "unrecognized error code" : known->text;
}
