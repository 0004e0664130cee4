/* The layout of every struct of mok.h on 64-bit Linux (LP64), pinned: a change here breaks programs that are already built. New
 * fields go to a struct's end (the size grows, nothing else moves). Included by the C and the C++ test. */
#ifndef MOK_TEST_ABI_TABLE_H
#define MOK_TEST_ABI_TABLE_H

/* X(struct, size) */
#define ABI_SIZE_LIST(X) \
    X(mok_config, 176) \
    X(mok_buffer_info, 32) \
    X(mok_pass_plan, 48) \
    X(mok_plan, 208) \
    X(mok_provider, 40) \
    X(mok_bootstrap, 40) \
    X(mok_weight, 40) \
    X(mok_weights, 248) \
    X(mok_grad, 24) \
    X(mok_grads, 184) \
    X(mok_schedule_args, 56) \
    X(mok_forward_args, 320) \
    X(mok_backward_args, 536) \
    X(mok_trace_event, 56) \
    X(mok_trace_clock, 24) \
    X(mok_finding, 828) \
    X(mok_stats, 128) \
    X(mok_schedule_info, 112) \
    X(mok_backend_info, 532) \
    X(mok_mx_quantise_args, 88) \
    X(mok_mx_widen_args, 272)

/* X(struct, field, offset, size) */
#define ABI_FIELD_LIST(X) \
    X(mok_config, struct_size, 0, 4) \
    X(mok_config, api_version, 4, 4) \
    X(mok_config, hidden, 8, 8) \
    X(mok_config, intermediate, 16, 8) \
    X(mok_config, shared_intermediate, 24, 8) \
    X(mok_config, routed_hidden, 32, 8) \
    X(mok_config, num_experts, 40, 8) \
    X(mok_config, topk, 48, 8) \
    X(mok_config, max_tokens, 56, 8) \
    X(mok_config, dtype, 64, 4) \
    X(mok_config, router_dtype, 68, 4) \
    X(mok_config, activation, 72, 4) \
    X(mok_config, swiglu_limit, 76, 4) \
    X(mok_config, gate_up, 80, 4) \
    X(mok_config, weight_layout, 84, 4) \
    X(mok_config, shared_gate, 88, 1) \
    X(mok_config, expert_bias, 89, 1) \
    X(mok_config, mx_wgrad_bf16, 90, 1) \
    X(mok_config, ring_rows, 96, 8) \
    X(mok_config, minibatch_rows, 104, 8) \
    X(mok_config, minibatch_rows_bwd, 112, 8) \
    X(mok_config, save, 120, 4) \
    X(mok_config, save_rows, 128, 8) \
    X(mok_config, save_x, 136, 1) \
    X(mok_config, comm_sms, 140, 4) \
    X(mok_config, comm_sms_bwd, 144, 4) \
    X(mok_config, reserve_sms, 148, 4) \
    X(mok_config, backend, 152, 4) \
    X(mok_config, cpu_threads, 156, 4) \
    X(mok_config, timeout_ms, 160, 8) \
    X(mok_config, mx_wide_given, 168, 1) \
    X(mok_config, yield_us, 172, 4) \
    X(mok_buffer_info, name, 0, 8) \
    X(mok_buffer_info, kind, 8, 4) \
    X(mok_buffer_info, offset, 16, 8) \
    X(mok_buffer_info, bytes, 24, 8) \
    X(mok_pass_plan, two_wave_rows, 0, 8) \
    X(mok_pass_plan, minibatch_rows, 8, 8) \
    X(mok_pass_plan, narrowest_gemm, 16, 8) \
    X(mok_pass_plan, flops, 24, 8) \
    X(mok_pass_plan, link_bytes_in, 32, 8) \
    X(mok_pass_plan, link_bytes_out, 40, 8) \
    X(mok_plan, struct_size, 0, 4) \
    X(mok_plan, api_version, 4, 4) \
    X(mok_plan, experts_first, 8, 8) \
    X(mok_plan, experts_count, 16, 8) \
    X(mok_plan, balanced_rows, 24, 8) \
    X(mok_plan, capacity_rows, 32, 8) \
    X(mok_plan, row_tile, 40, 8) \
    X(mok_plan, ring_rows, 48, 8) \
    X(mok_plan, saved_rows, 56, 8) \
    X(mok_plan, smallest_ring_rows, 64, 8) \
    X(mok_plan, heap_bytes, 72, 8) \
    X(mok_plan, local_bytes, 80, 8) \
    X(mok_plan, schedule_bytes, 88, 8) \
    X(mok_plan, context_bytes, 96, 8) \
    X(mok_plan, forward, 104, 48) \
    X(mok_plan, backward, 152, 48) \
    X(mok_plan, wide_bytes, 200, 8) \
    X(mok_provider, struct_size, 0, 4) \
    X(mok_provider, api_version, 4, 4) \
    X(mok_provider, user, 8, 8) \
    X(mok_provider, all_gather, 16, 8) \
    X(mok_provider, heap_alloc, 24, 8) \
    X(mok_provider, heap_free, 32, 8) \
    X(mok_bootstrap, struct_size, 0, 4) \
    X(mok_bootstrap, api_version, 4, 4) \
    X(mok_bootstrap, user, 8, 8) \
    X(mok_bootstrap, all_gather, 16, 8) \
    X(mok_bootstrap, timeout_ms, 24, 8) \
    X(mok_bootstrap, set_device, 32, 1) \
    X(mok_bootstrap, device, 36, 4) \
    X(mok_weight, packed, 0, 8) \
    X(mok_weight, experts, 8, 8) \
    X(mok_weight, scales, 16, 8) \
    X(mok_weight, transposed, 24, 8) \
    X(mok_weight, transposed_scales, 32, 8) \
    X(mok_weights, gate, 0, 40) \
    X(mok_weights, up, 40, 40) \
    X(mok_weights, down, 80, 40) \
    X(mok_weights, shared_gate, 120, 40) \
    X(mok_weights, shared_up, 160, 40) \
    X(mok_weights, shared_down, 200, 40) \
    X(mok_weights, shared_output_gate, 240, 8) \
    X(mok_grad, packed, 0, 8) \
    X(mok_grad, experts, 8, 8) \
    X(mok_grad, dtype, 16, 4) \
    X(mok_grad, accumulate, 20, 1) \
    X(mok_grads, gate, 0, 24) \
    X(mok_grads, up, 24, 24) \
    X(mok_grads, down, 48, 24) \
    X(mok_grads, shared_gate, 72, 24) \
    X(mok_grads, shared_up, 96, 24) \
    X(mok_grads, shared_down, 120, 24) \
    X(mok_grads, shared_output_gate, 144, 24) \
    X(mok_grads, ready, 168, 8) \
    X(mok_grads, ready_value, 176, 4) \
    X(mok_schedule_args, struct_size, 0, 4) \
    X(mok_schedule_args, api_version, 4, 4) \
    X(mok_schedule_args, layer, 8, 8) \
    X(mok_schedule_args, num_tokens, 16, 8) \
    X(mok_schedule_args, expert_ids, 24, 8) \
    X(mok_schedule_args, schedule, 32, 8) \
    X(mok_schedule_args, tokens_per_expert_local, 40, 8) \
    X(mok_schedule_args, tokens_per_expert_global, 48, 8) \
    X(mok_forward_args, struct_size, 0, 4) \
    X(mok_forward_args, api_version, 4, 4) \
    X(mok_forward_args, layer, 8, 8) \
    X(mok_forward_args, num_tokens, 16, 8) \
    X(mok_forward_args, schedule, 24, 8) \
    X(mok_forward_args, x, 32, 8) \
    X(mok_forward_args, router_weights, 40, 8) \
    X(mok_forward_args, weights, 48, 248) \
    X(mok_forward_args, context, 296, 8) \
    X(mok_forward_args, out, 304, 8) \
    X(mok_forward_args, wide, 312, 8) \
    X(mok_backward_args, struct_size, 0, 4) \
    X(mok_backward_args, api_version, 4, 4) \
    X(mok_backward_args, layer, 8, 8) \
    X(mok_backward_args, num_tokens, 16, 8) \
    X(mok_backward_args, schedule, 24, 8) \
    X(mok_backward_args, context, 32, 8) \
    X(mok_backward_args, dout, 40, 8) \
    X(mok_backward_args, x, 48, 8) \
    X(mok_backward_args, router_weights, 56, 8) \
    X(mok_backward_args, weights, 64, 248) \
    X(mok_backward_args, parts, 312, 4) \
    X(mok_backward_args, dx, 320, 8) \
    X(mok_backward_args, drouter_weights, 328, 8) \
    X(mok_backward_args, grads, 336, 184) \
    X(mok_backward_args, wide, 520, 8) \
    X(mok_backward_args, wide_dgrad, 528, 8) \
    X(mok_stats, struct_size, 0, 4) \
    X(mok_stats, api_version, 4, 4) \
    X(mok_stats, schedules, 8, 8) \
    X(mok_stats, forwards, 16, 8) \
    X(mok_stats, recomputes, 24, 8) \
    X(mok_stats, backwards, 32, 8) \
    X(mok_stats, rows, 40, 8) \
    X(mok_stats, rows_pulled, 48, 8) \
    X(mok_stats, rows_pulled_peer, 56, 8) \
    X(mok_stats, rows_copied, 64, 8) \
    X(mok_stats, rows_replayed, 72, 8) \
    X(mok_stats, rows_padding, 80, 8) \
    X(mok_stats, ring_rotations, 88, 8) \
    X(mok_stats, wgrad_continued, 96, 8) \
    X(mok_stats, bytes_pulled_peer, 104, 8) \
    X(mok_stats, bytes_pushed_peer, 112, 8) \
    X(mok_stats, mx_not_finite, 120, 8) \
    X(mok_schedule_info, struct_size, 0, 4) \
    X(mok_schedule_info, api_version, 4, 4) \
    X(mok_schedule_info, tokens_global, 8, 8) \
    X(mok_schedule_info, rows, 16, 8) \
    X(mok_schedule_info, table_rows, 24, 8) \
    X(mok_schedule_info, rows_copied_fwd, 32, 8) \
    X(mok_schedule_info, rows_copied_bwd, 40, 8) \
    X(mok_schedule_info, rows_pulled_peer_fwd, 48, 8) \
    X(mok_schedule_info, rows_pulled_peer_bwd, 56, 8) \
    X(mok_schedule_info, wgrad_pieces, 64, 8) \
    X(mok_schedule_info, wgrad_continued, 72, 8) \
    X(mok_schedule_info, bytes_pulled_peer_fwd, 80, 8) \
    X(mok_schedule_info, bytes_pushed_peer_fwd, 88, 8) \
    X(mok_schedule_info, bytes_pulled_peer_bwd, 96, 8) \
    X(mok_schedule_info, bytes_pushed_peer_bwd, 104, 8) \
    X(mok_backend_info, struct_size, 0, 4) \
    X(mok_backend_info, api_version, 4, 4) \
    X(mok_backend_info, id, 8, 4) \
    X(mok_backend_info, name, 12, 32) \
    X(mok_backend_info, usable, 44, 1) \
    X(mok_backend_info, detail, 45, 480) \
    X(mok_backend_info, num_devices, 528, 4) \
    X(mok_mx_quantise_args, struct_size, 0, 4) \
    X(mok_mx_quantise_args, api_version, 4, 4) \
    X(mok_mx_quantise_args, backend, 8, 4) \
    X(mok_mx_quantise_args, count, 16, 8) \
    X(mok_mx_quantise_args, rows, 24, 8) \
    X(mok_mx_quantise_args, cols, 32, 8) \
    X(mok_mx_quantise_args, source, 40, 8) \
    X(mok_mx_quantise_args, data, 48, 8) \
    X(mok_mx_quantise_args, scales, 56, 8) \
    X(mok_mx_quantise_args, transposed, 64, 8) \
    X(mok_mx_quantise_args, transposed_scales, 72, 8) \
    X(mok_mx_quantise_args, not_finite, 80, 8) \
    X(mok_mx_widen_args, struct_size, 0, 4) \
    X(mok_mx_widen_args, api_version, 4, 4) \
    X(mok_mx_widen_args, weights, 8, 248) \
    X(mok_mx_widen_args, wide, 256, 8) \
    X(mok_mx_widen_args, wide_dgrad, 264, 8)
#endif
