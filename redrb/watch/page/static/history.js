// The last ten minutes of each task: points that the server has kept, then one for each new state.
const MOST = 600;
const NAMES = ["put", "acked", "waiting", "leased", "staleness", "reward"];

class TaskHistory {
  constructor() {
    this.times = [];
    this.columns = Object.fromEntries(NAMES.map((name) => [name, []]));
  }

  add(time, point) {
    if (this.times.length && time <= this.times.at(-1)) return;
    this.times.push(time);
    for (const name of NAMES) this.columns[name].push(point[name] ?? null);
    if (this.times.length > MOST) {
      this.times.shift();
      for (const name of NAMES) this.columns[name].shift();
    }
  }

  // Ages of the points in seconds, by the newest point.
  ages() {
    const newest = this.times.at(-1) || 0;
    return this.times.map((time) => newest - time);
  }

  values(name) {
    return this.columns[name];
  }
}

export class Histories {
  constructor() {
    this.tasks = new Map();
  }

  of(task) {
    if (!this.tasks.has(task)) this.tasks.set(task, new TaskHistory());
    return this.tasks.get(task);
  }

  column(task, name) {
    return this.of(task).values(name);
  }

  // `points` is {task: {time: [...], put: [...], ...}}.
  load(points) {
    this.tasks.clear();
    this.add(points);
  }

  add(points) {
    for (const [task, columns] of Object.entries(points)) {
      columns.time.forEach((time, at) => this.of(task).add(time, Object.fromEntries(NAMES.map((name) => [name, columns[name][at]]))));
    }
  }
}
