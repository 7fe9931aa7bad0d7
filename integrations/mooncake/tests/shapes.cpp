#include "shapes.hpp"

#include <json/json.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <stdexcept>

namespace test {

namespace {

/// Untouched bytes at both ends of each buffer.
constexpr uint64_t kGuard = 4096;

uint64_t slot(const Shape& shape, uint64_t length) {
    return (length + shape.align - 1) / shape.align * shape.align;
}

/// Where pieces of these lengths begin, in a random order of their places.
std::vector<uint64_t> places(const Shape& shape, const std::vector<uint64_t>& lengths,
                             std::mt19937_64& random) {
    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::vector<uint64_t> places(lengths.size());
    uint64_t at = kGuard;
    for (const auto index : order) {
        places[index] = at;
        at += slot(shape, lengths[index]);
    }
    return places;
}

}  // namespace

uint64_t Shape::bytes() const {
    uint64_t bytes = 0;
    for (const auto& [count, length] : parts) bytes += count * length;
    return bytes;
}

uint64_t Shape::extent() const {
    uint64_t extent = 2 * kGuard;
    for (const auto& [count, length] : parts) extent += count * slot(*this, length);
    return extent;
}

std::vector<Shape> read_shapes(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    std::vector<Shape> shapes;
    for (std::string line; std::getline(file, line);) {
        Json::Value value;
        std::istringstream text(line);
        if (!Json::parseFromStream(Json::CharReaderBuilder(), text, &value, nullptr))
            throw std::runtime_error(path + " is no list of shapes");
        const auto id = value["id"].asString();
        if (id.size() != 2 || id < "R1" || id > "R6") continue;
        Shape shape{.id = id, .parts = {}, .align = value["align"].asUInt64()};
        for (const auto& part : value["parts"])
            shape.parts.emplace_back(part[0].asUInt64(), part[1].asUInt64());
        shapes.push_back(std::move(shape));
    }
    if (shapes.size() != 6) throw std::runtime_error(path + " has not all of R1 to R6");
    return shapes;
}

std::vector<Piece> layout(const Shape& shape, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<uint64_t> lengths;
    for (const auto& [count, length] : shape.parts) lengths.insert(lengths.end(), count, length);
    std::shuffle(lengths.begin(), lengths.end(), random);
    const auto sources = places(shape, lengths, random);
    const auto destinations = places(shape, lengths, random);
    std::vector<Piece> pieces;
    for (size_t at = 0; at < lengths.size(); at++)
        pieces.push_back({sources[at], destinations[at], lengths[at]});
    return pieces;
}

Bytes pattern(uint64_t seed, size_t size) {
    Bytes bytes(size);
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = (seed << 40) + at;
        word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
        word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
        word ^= word >> 31;
        std::memcpy(bytes.data() + at, &word, std::min<size_t>(8, size - at));
    }
    return bytes;
}

void apply(const std::vector<Piece>& pieces, const Bytes& source, Bytes& destination) {
    for (const auto& piece : pieces)
        std::memcpy(destination.data() + piece.destination, source.data() + piece.source,
                    piece.length);
}

}  // namespace test
