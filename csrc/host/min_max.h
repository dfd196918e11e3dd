// Provides std::min and std::max. All of <algorithm> would take a tenth of the time in which a kernel compiles.
#pragma once

#include <cstddef>  // defines __GLIBCXX__ if this is libstdc++

#ifdef __GLIBCXX__
#include <bits/stl_algobase.h>
#else
#include <algorithm>
#endif
