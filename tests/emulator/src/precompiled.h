// The precompiled header of the headers that most sources include. Each source still includes all headers that it uses.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "cluster.h"
#include "decoder.h"
#include "families/families.h"
