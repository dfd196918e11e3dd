// griddepcontrol: order between a launch that may begin early (Launch::is_dependent) and the launch before it.
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol".
#pragma once

namespace fastattn::ptx {

// Waits until the launch before has ended, and sees all that it wrote. Each thread that reads this waits itself.
__device__ __forceinline__ void griddepcontrol_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace fastattn::ptx
