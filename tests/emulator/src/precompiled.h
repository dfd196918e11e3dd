// What most sources include, which the build parses once for all of them. Each source includes what it uses all the
// same.
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
