// Cards of the devices, and of host memory and disk.
import { Keyed, h, setText, show } from "./dom.js";
import { bar, lanes } from "./parts.js";
import { left, size, spaced, title } from "./words.js";

// Returns the element of all cards, and the function that updates it with the devices and the active jobs.
export const devices = () => {
  const cards = h("ul", { class: "cards" }), list = new Keyed(cards, (item) => item.key, (item) => item.card());
  return [cards, (found, jobs) => {
    const on = (one) => jobs.filter((job) => job.device === one.index);
    const device = (one) => ({ key: one.index, card: deviceCard, one, jobs: on(one) });
    list.set([...found.devices.map(device), { key: "host", card: hostCard, one: found }]);
  }];
};

const memory = (what) => {
  const text = h("p", { class: "meta" }), [shown, set] = bar(`${what} reserved`, "meter");
  return [h("div", { class: "memory" }, text, shown), (reserved, limit) => {
    const words = `${size(reserved)} of ${size(limit)} ${what} reserved`;
    setText(text, words);
    set(limit ? reserved / limit : 0, words);
  }];
};

const deviceCard = () => {
  const name = h("h3"), kind = h("p", { class: "meta" }), [room, setRoom] = memory("device memory");
  const idle = h("p", { class: "idle" }, "Idle"), list = h("ul", { class: "on-device" });
  const jobs = new Keyed(list, (job) => job.id, deviceJob);
  return [h("li", { class: "card device" }, h("div", { class: "between" }, name, kind), room, idle, list), (item) => {
    setText(name, `Device ${item.one.index}`);
    setText(kind, item.one.name);
    show(room, item.one.memory > 0);
    if (item.one.memory) setRoom(item.one.reserved, item.one.memory);
    show(idle, !item.jobs.length);
    jobs.set(item.jobs);
  }];
};

const deviceJob = () => {
  const link = h("a", { class: "title" }), done = h("span"), rest = h("span");
  const tiles = h("p", { class: "meta between" }, done, rest);
  const [shown, setDone] = bar("Tiles of C that are finished"), [busy, setBusy] = lanes();
  return [h("li", {}, link, shown, tiles, busy), (job) => {
    const { done: finished, total } = job.progress ?? { done: 0, total: 1 };
    link.href = `#/jobs/${job.id}`;
    setText(link, title(job));
    setDone(finished / total, `${spaced(finished)} of ${spaced(total)} tiles`);
    setText(done, `${spaced(finished)} of ${spaced(total)} tiles`);
    setText(rest, job.state === "running" ? left(job) : job.state);
    setBusy(job.activity);
  }];
};

const hostCard = () => {
  const [host, setHost] = memory("host memory"), [disk, setDisk] = memory("disk space");
  return [h("li", { class: "card device" }, h("h3", {}, "Machine"), host, disk), ({ one }) => {
    setHost(one.host.reserved, one.host.memory);
    setDisk(one.disk.reserved, one.disk.quota);
  }];
};
