#include "attention/backward_sinks_sm80.cuh"  // without template arguments, it is complete there
