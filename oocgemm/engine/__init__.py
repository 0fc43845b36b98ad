"""The engine: runs a plan's schedule on a backend and on stores.

A tile's life
=============

This page follows one tile of C, with its panels of A and B, from the plan to the chunks that are written.
The product is ``C = alpha op(A) @ op(B) + beta C``. Five words recur. A *tile* is a block of C, and a *strip*
is some rows of it. A *panel* is the block of A or B that one multiplication takes. A *slot* is a buffer, on
the device or in host memory, for one panel, tile or strip. A *lane* names the kind of work that an operation
does, such as reading or copying to the device.

1. *Plan.* `planning.search.planner` (`make_plan`) chooses the size of the tiles and the number of slots per
   operand, on the host and on the device. `planning.schedule` then yields the operations of the tile one by
   one, in program order. Each operation names the parts of slots (*regions*) that it reads and writes.
   Operations contain no other reference to each other.

2. *Dispatch.* `executor.Run._dispatch` iterates over the schedule.
   `planning.schedule.hazards.HazardTracker.admit` compares regions to find the earlier operations that each
   operation must wait for. The operation is then appended to the queue of its stream. If too many operations
   are in flight (`executor.MAX_IN_FLIGHT`), the iteration pauses (backpressure).

3. *Read* (lanes `read`, `decode`). A thread of the stream runs the operation in `executor.Run._transfer`.
   `staging.Staging.transfer` passes the panel to `transfers.Transfers.read`. That cuts it into parts
   (`blocks.parts`), which the reader threads read from the store into a host slot
   (`slots.HostSlots.columns`). They thereby fault in the slot's pages. Then the stream's thread pins the
   pages. If the panel is in the caller's memory and pinned there (`pinning.PinnedOperands`), nothing is read.
   The upload then copies the panel from there (`zero_copy.ZeroCopy.assign`). If host and device share one
   memory, the store reads into the device slot directly.

4. *Upload* (lane `h2d`). `executor.Run._submit` passes the panel's host memory
   (`staging.Staging.upload_source`) to `Session.submit` of the backend. On CUDA, `backends.cuda.session`
   enqueues the copies (`backends.cuda.copies`) on the h2d stream and makes the stream wait for the events of
   earlier operations. On the host, `backends.host.backend` copies at once. Either way, `submit` returns a
   token, the handle of the submitted operation. If beta != 0, the old C of the tile is read and uploaded in
   the same way, strip by strip.

5. *Prepare* (lane `prepare`; emulated products only). The two panels of a step are split into int8 residues:
   `backends.cuda.emulated.Emulated.prepare` or `backends.host.residues.prepare`.

6. *Multiply* (lane `compute`). It adds the product of two panels to the tile on the device. There is one
   Multiply per step along k. The last steps of a tile have one Multiply per strip, so that a finished strip
   is downloaded while later ones are multiplied.
   `backends.cuda.multiplier.Multiplier` launches cuBLAS or one of our own kernels (`kernels.registry`).
   `backends.host.blas.gemm` calls the BLAS of NumPy.

7. *Finish* (lane `compute`; only if the tile on the device has a wider dtype than C or still lacks alpha and
   beta). It applies alpha and beta and casts a strip to C's dtype: `backends.cuda.launch.Kernels.finish`,
   `backends.integers.finish`.

8. *Download* (lane `d2h`). A strip is copied to a host slot, whose pages `slots.HostSlots` has faulted in
   (`staging.Staging.prepare_download`), or directly to the caller's C. The next tile starts as soon as
   strips of the device slot are free.

9. *Write* (lanes `encode`, `write`). If the run is verified, `executor.Verifier.transfer`
   (`integrity.checksums`) first checks the strip. `transfers.Transfers.write` has the writer threads encode
   its chunks and write them. After the last strip of the tile, `Run` calls its callback `finished`.
   `jobs.output` then makes the tile durable and records it in the journal.

10. *Record.* `executor.Run._collect` waits for submitted operations in the order of submission. It turns each
    one into a span of the timeline (`timeline`): when the operation ran, on which lane, and which operations
    it waited for.

An error at any stage stops the run (`executor.Run._fail`). The thread that meets the error posts the
completion of its operation without a token. This cancels the operations that wait for it.
"""
