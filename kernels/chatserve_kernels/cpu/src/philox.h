// Uniform numbers that are a function of (seed, position): `chatserve_kernels.random` in C++, to the last bit.
#pragma once

#include <cstdint>

namespace cs {

// In [0, 1), in steps of 2^-53: the seed is the key of Philox4x32-10, the position its counter.
inline double uniform(uint64_t seed, uint64_t position) {
  uint32_t words[4] = {uint32_t(position), uint32_t(position >> 32), 0, 0};
  uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t first = uint64_t(0xD2511F53) * words[0], second = uint64_t(0xCD9E8D57) * words[2];
    words[0] = uint32_t(second >> 32) ^ words[1] ^ key[0];
    words[1] = uint32_t(second);
    words[2] = uint32_t(first >> 32) ^ words[3] ^ key[1];
    words[3] = uint32_t(first);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return double(uint64_t(words[0]) << 21 ^ words[1] >> 11) * 0x1p-53;
}

}  // namespace cs
