// Returns the description of this library's build, as the JSON text that the build passes in. Python reads it through
// ctypes.

#ifndef FASTATTN_BUILD_INFO
#error "FASTATTN_BUILD_INFO must be defined as a string literal with the build's description in JSON"
#endif

extern "C" __attribute__((visibility("default"))) const char* fastattn_build_info() {
    return FASTATTN_BUILD_INFO;
}
