// What is moved, and how it looks when it has arrived.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace test {

/// One copy: offsets into the source's and the destination's buffer.
struct Piece {
    uint64_t source;
    uint64_t destination;
    uint64_t length;
};

struct Shape {
    std::string id;
    /// Count and length of equal pieces.
    std::vector<std::pair<uint64_t, uint64_t>> parts;
    uint64_t align;

    uint64_t bytes() const;
    /// What both buffers need, guards included.
    uint64_t extent() const;
};

/// R1 to R6 of a file of shapes, one JSON object a line. Throws std::runtime_error.
std::vector<Shape> read_shapes(const std::string& path);

/// The pieces in random order and at random places of both buffers, which processes agree about
/// without talking.
std::vector<Piece> layout(const Shape& shape, uint64_t seed);

/// Bytes that differ from those of another seed, and from place to place.
Bytes pattern(uint64_t seed, size_t size);

/// Lays pieces of `source` over `destination`.
void apply(const std::vector<Piece>& pieces, const Bytes& source, Bytes& destination);

}  // namespace test
