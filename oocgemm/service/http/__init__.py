"""The HTTP server of the service.

- `config`: what `oocgemm serve` was told.
- `service`: what all requests share: the database, the dispatcher, the feed of events.
- `app`: the application. `jobs`, `changes`, `files`, `events`, `machine`, `page` have its routes.
- `views`: the JSON of requests and answers. `problems`: the JSON of errors.
- `security`: what a request passes before its route. `identity`, `tokens`: who sends it.
- `submission`: from a request to a job of the store.
- `server`: sockets, the dispatcher's thread, signals.

The event loop neither reads the database nor plans. Both are done in threads.
"""
