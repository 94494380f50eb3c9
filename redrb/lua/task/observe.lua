-- Read what a task holds and who works on it, at one moment. Writes nothing. Its work does not depend on the
-- number of groups.
-- KEYS[1] stream
-- ARGV    the call `Observe` of redrb/watch/state/calls.py
-- Returns its reply, and behind it name and announcement of each worker: include/announcements.lua
--@include task clock facts ledger pending counters announcements

if not exists() then
  return {cmsgpack.pack({put = 0})}
end
--@include staleness_counts
local ask = cmsgpack.unpack(ARGV[1])
local names, odd = known_groups()
local first, joined = ask.group ~= '' and ask.group or 'default', {}
local ordered = {first}
for _, name in ipairs(names) do
  joined[name] = true
  if name ~= first and #ordered < PAGE.observed_consumer_groups then
    ordered[#ordered + 1] = name
  end
end
if ask.group == '' and #ordered > 1 and not joined[first] then
  table.remove(ordered, 1)
end
local figures, reported, now = {}, {}, reported_ms()
local function report_to(list)
  return function(name, value)
    list[name] = value
  end
end
local stored, totals = report_task(report_to(figures)), put_totals()
local listed = #names > 0 and redis.call('EXISTS', stream) == 1
  and by_name(redis.call('XINFO', 'GROUPS', stream)) -- bound: consumer groups
local most = math.max(2, math.floor(PAGE.observed_groups / #ordered))

-- How stale the groups were that a consumer group has taken: staleness and number.
local function taken_by(name)
  local taken, found = redis.call('HGETALL', key('staleness', name)), {} -- bound: 4 * (MOST_STALENESS + 1)
  for i = 1, #taken, 2 do
    local age = string.match(taken[i], '^o(%d+)$')
    if age then
      found[#found + 1] = {tonumber(age), taken[i + 1]}
    end
  end
  return found
end

for i, name in ipairs(ordered) do
  local own = {}
  if joined[name] then
    local leased = listed and listed[name] and listed[name].pending or 0
    report_group(report_to(own), name, leased, totals, now)
    reported[i] = {name = name, figures = own, waiting = count_waiting(name, most),
      leased = read_leased(name, leased, most), taken = taken_by(name)}
  else
    report_found(report_to(own), stored)
    reported[i] = {name = name, figures = own, waiting = {groups = stored}, leased = {groups = 0}}
  end
end
local seen, workers = announced_since(ask.since, PAGE.observed_workers)
local memory = 0
for _, name in ipairs({stream, key('facts'), key('dead')}) do
  -- the user may lack the permission
  local known, nbytes = pcall(redis.call, 'MEMORY', 'USAGE', name, 'SAMPLES', '5')
  memory = known and memory and memory + (nbytes or 0) or nil
end
local settings = {incarnation = ''}
for _, name in ipairs(ask.settings) do
  settings[name] = redis.call('HGET', task, name) or settings[name]
end
return {cmsgpack.pack({
  settings = settings,
  put = number(puts, 'put'),
  server_ms = server_ms(),
  version = rules().version,
  figures = figures,
  groups = reported,
  odd_groups = odd,
  workers_total = announced_count(),
  seen_ms = seen,
  memory_bytes = memory,
}), unpack(workers)}
