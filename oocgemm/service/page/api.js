// Requests to the service.

// An answer that is an error, as RFC 9457 describes it. `status` is 0 if the service cannot be reached.
export class Problem extends Error {
  constructor(status, body) {
    super(body.detail ?? body.title ?? "The service has sent an answer that is no JSON");
    Object.assign(this, { status, title: body.title ?? "The request has failed", type: body.type ?? "", body });
  }
}

// The function to call if the service does not know who sends a request.
let signedOut = () => {};
export const onSignedOut = (action) => { signedOut = action; };

// Sends a request and returns the answer's JSON. Throws a `Problem`.
export const call = async (method, path, { body, headers = {}, signal, login = false } = {}) => {
  const answer = await request(method, path, { body, headers, signal });
  if (answer.ok) return answer.status === 204 ? null : answer.json();
  const problem = new Problem(answer.status, await answer.json().catch(() => ({})));
  if (answer.status === 401 && !login) signedOut();
  throw problem;
};

const request = async (method, path, { body, headers, signal }) => {
  const sent = body === undefined ? headers : { ...headers, "Content-Type": "application/json" };
  try {
    return await fetch(path, { method, headers: sent, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem(0, {
      title: "The service cannot be reached",
      detail: "It may be restarting, or the network is down. Jobs go on meanwhile.",
    });
  }
};

// Returns the bytes of a file of a job from an offset on, and the offset of their end. Without an offset, returns the
// last bytes. A range that begins at the end of the file would be an error, so the range begins one byte before.
export const tail = async (path, from, most) => {
  const range = from > 0 ? `bytes=${from - 1}-${from + most - 1}` : `bytes=-${most}`;
  const answer = await request("GET", path, { headers: { Range: range } });
  if (!answer.ok) throw new Problem(answer.status, await answer.json().catch(() => ({})));
  const bytes = new Uint8Array(await answer.arrayBuffer());
  const found = /bytes (\d+)-(\d+)\/(\d+)/.exec(answer.headers.get("Content-Range") ?? "");
  const begin = found ? Number(found[1]) : 0;
  return { bytes: from > 0 ? bytes.subarray(from - begin) : bytes, begin, end: begin + bytes.length };
};
