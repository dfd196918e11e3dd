// griddepcontrol: orders a launch that may begin early (Launch::is_dependent) after the launch before it.
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace fastattn::ptx {

// Waits until the previous launch has ended and this thread sees its writes. Every thread that reads these writes must
// call it.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace fastattn::ptx
