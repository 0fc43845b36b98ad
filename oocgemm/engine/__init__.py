"""The engine: runs a plan's schedule on a backend and on stores.

A tile's life
=============

This page follows one tile of C, with its panels of A and B, from the plan to the chunks that are written.
The product is ``C = alpha op(A) @ op(B) + beta C``. The lane is where an operation runs.

1. *Plan.* `planning.search.planner` (`make_plan`) chooses the tile's extents and the number of slots per
   operand and tier. `planning.schedule` then yields the operations of the tile one by one, in program
   order. Each operation names the regions of slots that it reads and writes, and nothing else links
   operations to each other.

2. *Dispatch.* `executor.Run._dispatch` walks the schedule. `planning.schedule.hazards.HazardTracker.admit`
   derives from the regions which earlier operations each operation must wait for. The operation goes to the
   queue of its stream. At most `executor.MAX_IN_FLIGHT` operations are in flight; beyond that, the walk
   pauses (backpressure).

3. *Read* (lanes `read`, `decode`). A thread of the stream takes the operation in `executor.Run._transfer`.
   `staging.Staging.transfer` passes the panel to `transfers.Transfers.read`. That cuts it into parts
   (`blocks.parts`), which the reader threads read from the store into a host slot
   (`slots.HostSlots.columns`). The thread then pins the slot's pages, whose first access has just faulted
   them in. If the panel lies in the caller's memory and is pinned there (`pinning.PinnedOperands`), there
   is nothing to read: the slot stands for the panel in place (`zero_copy.ZeroCopy.assign`). Where host and
   device are one memory, the store reads into the device slot directly.

4. *Upload* (lane `h2d`). `executor.Run._submit` passes the host memory (`staging.Staging.upload_source`) to
   `Session.submit` of the backend. On CUDA, `backends.cuda.session` enqueues the copies
   (`backends.cuda.copies`) on the h2d stream behind the events that they wait for, and returns a token. On
   the host, `backends.host.backend` copies at once. If the problem has beta != 0, the old C of the tile is
   read and uploaded in the same way, strip by strip.

5. *Prepare* (lane `prepare`; emulated products only). The panels of a step are split into int8 residues:
   `backends.cuda.emulated.Emulated.prepare` or `backends.host.residues.prepare`.

6. *Multiply* (lane `compute`). One per step along k, or one per step and strip near the end of the tile. It
   adds a product of panels to the accumulator: `backends.cuda.multiplier.Multiplier` launches cuBLAS or a
   kernel of the ladder (`kernels.registry`), `backends.host.blas.gemm` calls the BLAS of NumPy.

7. *Finish* (lane `compute`; only if the accumulator is wider than C, or has other values than C). The
   epilogue applies alpha and beta and casts a strip of the accumulator to C's dtype:
   `backends.cuda.launch.Kernels.finish`, `backends.integers.finish`.

8. *Download* (lane `d2h`). A strip drains to a host slot, which `slots.HostSlots` has prefaulted
   (`staging.Staging.prepare_download`), or in place to the caller's C. The next tile starts as soon as the
   accumulator's strips are free.

9. *Write* (lanes `encode`, `write`). If the run is verified, `executor.Verifier.transfer`
   (`integrity.checksums`) first checks the strip. `transfers.Transfers.write` has the writer threads encode
   its chunks and write them. When the last strip of the tile is written, `Run` calls `finished`;
   `jobs.output` makes the tile durable and records it in the journal.

10. *Record.* `executor.Run._collect` polls for operations that have ended, in the order of submission, and
   turns each into a span of the timeline (`timeline`): when it ran, on which lane, and what it had waited
   for.

An error at any stage stops the run (`executor.Run._fail`). The thread that meets it posts the completion of
its operation without a token, which cancels the operations that wait for it.
"""
