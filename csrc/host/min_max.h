// Provides std::min and std::max. All of <algorithm> would take a tenth of the time in which a kernel compiles.
#pragma once

#include <cstddef>  // says whose standard library this is

#ifdef __GLIBCXX__
#include <bits/stl_algobase.h>
#else
#include <algorithm>
#endif
