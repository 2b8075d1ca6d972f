// Launches one kernel in a process of its own, for AddressSanitizer. Every buffer is an allocation of exactly its size,
// so that one element too far is seen. Reads a request from standard input, writes the result to standard output; all
// numbers are uint64:
//   request  grid[3] threads[3] dynamic_bytes schedule, buffers, {bytes, address % 16, data}..., relocations,
//            {buffer, offset, target buffer}..., arguments, {is_buffer, value or buffer}...
//   result   failed, message_bytes, message, the buffers' data in order
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

extern "C" int cuda_cpu_launch(const unsigned* grid, const unsigned* threads, size_t dynamic_bytes,
                               const uint64_t* arguments, size_t count, uint64_t schedule, char* message,
                               size_t message_size);

namespace {

void read_bytes(void* to, size_t bytes) {
    if (bytes && fread(to, 1, bytes, stdin) != bytes) exit(3);
}

uint64_t read_number() {
    uint64_t number;
    read_bytes(&number, sizeof number);
    return number;
}

struct Buffer {
    char* data;
    size_t bytes;
};

}  // namespace

int main() {
    unsigned grid[3], threads[3];
    for (unsigned& size : grid) size = read_number();
    for (unsigned& size : threads) size = read_number();
    const size_t dynamic_bytes = read_number();
    const uint64_t schedule = read_number();

    std::vector<Buffer> buffers(read_number());
    for (Buffer& buffer : buffers) {
        buffer.bytes = read_number();
        const size_t misalignment = read_number();
        buffer.data = static_cast<char*>(malloc(misalignment + buffer.bytes)) + misalignment;  // malloc: 16 bytes
        read_bytes(buffer.data, buffer.bytes);
    }
    for (uint64_t left = read_number(); left > 0; --left) {
        char* place = buffers[read_number()].data;
        place += read_number();
        const auto address = reinterpret_cast<uint64_t>(buffers[read_number()].data);
        memcpy(place, &address, sizeof address);
    }
    std::vector<uint64_t> arguments(read_number());
    for (uint64_t& argument : arguments) {
        const bool is_buffer = read_number();
        argument = read_number();
        if (is_buffer) argument = reinterpret_cast<uint64_t>(buffers[argument].data);
    }

    char message[1024] = "";
    const uint64_t failed = cuda_cpu_launch(grid, threads, dynamic_bytes, arguments.data(), arguments.size(), schedule,
                                            message, sizeof message);
    const uint64_t message_bytes = strlen(message);
    fwrite(&failed, sizeof failed, 1, stdout);
    fwrite(&message_bytes, sizeof message_bytes, 1, stdout);
    fwrite(message, 1, message_bytes, stdout);
    for (const Buffer& buffer : buffers) fwrite(buffer.data, 1, buffer.bytes, stdout);
    fflush(stdout);
    return 0;
}
