#!/bin/sh
# Emulated Hopper and Blackwell on the same data: outputs and all gradients have the same bits.
#   tests/emu/same_bits.sh BUILD
build=$1
MOK_TEST_SEED=${MOK_TEST_SEED:-$(date +%s)}
export MOK_TEST_SEED MOK_TEST_BITS_ONLY=1
bits() {
    "$build/test_emu_backward$1" a_cut_weight_gradient bf16_gradients | grep 'bits of'
    "$build/test_emu_mx_layer$1" forward_has_the_bits a_cut_weight_gradient gradients_in_one_call | grep 'bits of'
}
hopper=$(bits) blackwell=$(bits _sm100)
echo "seed: MOK_TEST_SEED=$MOK_TEST_SEED"
if [ -n "$hopper" ] && [ "$hopper" = "$blackwell" ]; then
    echo "PASS both_chips_have_the_same_bits ($(echo "$hopper" | wc -l) layers)"
else
    printf 'Hopper:\n%s\nBlackwell:\n%s\n' "$hopper" "$blackwell"
    echo "FAIL both_chips_have_the_same_bits"
    exit 1
fi
