// Checks the panels of kernels/common/layout.cuh on the CPU: each map one to one, no bank conflicts, and the offsets that
// tensor_f64.cu forms by hand the same. Prints what is wrong, then ok.
#include <cstdio>
#include <set>

#include "layout.cuh"

static int wrong = 0;
static void expect(bool right, const char* what) {
    if (!right) ++wrong, std::puts(what);
}

int main() {
    for (int width : {64, 128, 256})
        for (int depth : {16, 32}) {
            std::set<unsigned> by_k, by_mn;
            for (int mn = 0; mn < width; ++mn)
                for (int k = 0; k < depth; ++k) {
                    by_k.insert(k_rows_offset(mn, k, depth));
                    by_mn.insert(mn_rows_offset(mn, k, width));
                }
            const unsigned values = width * depth;
            expect(by_k.size() == values && *by_k.rbegin() == values * 8 - 8, "k_rows_offset is not one to one");
            expect(by_mn.size() == values && *by_mn.rbegin() == values * 8 - 8, "mn_rows_offset is not one to one");
            for (int group = 0; group < width / 16; ++group)
                for (int half = 0; half < depth / 8; ++half)
                    for (int r = 0; r < 2; ++r)
                        for (int lanes = 0; lanes < 32; lanes += 8) {
                            std::set<unsigned> banks_y, banks_x;
                            for (int lane = lanes; lane < lanes + 8; ++lane) {
                                const int g = lane / 4, t = lane % 4;
                                const unsigned y = k_rows_offset(16 * group + 2 * g + r, 8 * half + 2 * t, depth);
                                const unsigned x = mn_rows_offset(16 * group + 2 * g, 8 * half + 2 * t + r, width);
                                banks_y.insert(y / 16 % 8);
                                banks_x.insert(x / 16 % 8);
                                expect(y == unsigned(2 * g * depth * 8 + t * 16 + ((g & 1) * 64 ^ (half & 1) * 64) +
                                                     (16 * group + r) * depth * 8 + half / 2 * 128), "load_y_quad");
                                expect(x == unsigned(2 * t * width * 8 + (g * 16 ^ t * 32) + (8 * half + r) * width * 8 +
                                                     group * 128), "load_x_quad");
                            }
                            expect(banks_y.size() == 8 && banks_x.size() == 8, "bank conflict");
                        }
        }
    for (int size : {4, 8})  // a warp turns eight k by four mn, value by value; 8-byte values go half a warp at a time
        for (int first = 0; first < 32; first += 128 / size) {
            std::set<int> banks;
            for (int lane = first; lane < first + 128 / size; ++lane)
                banks.insert((lane % 8 * simt_pitch(128, size) + lane / 8 * size) / size % (128 / size));
            expect(banks.size() == 128u / size, "simt: bank conflict");
        }
    for (int lanes_m : {4, 8}) {
        std::set<int> lanes;
        for (int lane = 0; lane < 32; ++lane) {
            lanes.insert(lane_row(lane, lanes_m) * 32 / lanes_m + lane_column(lane, lanes_m));
            expect(lane_column(lane, lanes_m) == lane_column(lane ^ 1, lanes_m), "neighbours must share a column");
            expect(lane_row(lane, lanes_m) == lane_row(lane ^ 2, lanes_m), "lanes two apart must share a row");
        }
        expect(lanes.size() == 32 && *lanes.rbegin() == 31, "lanes are not one to one");
    }
    if (!wrong) std::puts("ok");
    return wrong != 0;
}
