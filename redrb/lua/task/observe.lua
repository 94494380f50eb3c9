-- Read what a task holds and who works on it, at one moment. Writes nothing. Its work does not depend on the
-- number of groups.
-- KEYS[1] stream
-- ARGV    group, since
--         group: name of the consumer group that is reported also if it has not joined; '': 'default', unless
--           only others have joined
--         since: the reader has the workers that announced themselves before this server's ms; '-inf': none
-- Returns {settings, groups put, server's ms, figures, consumer groups, number of workers, workers, memory}
--       | {}: there is no task
--         settings: the hash of the task, as HGETALL returns it
--         figures: flat list of include/figures.lua, of the task
--         consumer groups: {name, figures, version, waiting, leased, taken} of each, a page of them:
--           figures: flat list of include/figures.lua, of the consumer group
--           version: newest weight version that the task knows, or ''
--           waiting, leased: include/staleness_counts.lua
--           taken: staleness:<group>, as HGETALL returns it
--         workers: {name, server's ms of the last announcement, announcement} of each, a page of them,
--           the newest first: include/announcements.lua
--         memory: bytes of groups, facts and dead letters, as Redis estimates them; -1: not known
--@include task clock facts ledger pending figures announcements

if not exists() then
  return {}
end
--@include staleness_counts
local names, first, joined = groups(), ARGV[1] ~= '' and ARGV[1] or 'default', {}
table.sort(names)
local ordered = {first}
for _, name in ipairs(names) do
  joined[name] = true
  if name ~= first and #ordered < PAGE.observed_consumer_groups then
    ordered[#ordered + 1] = name
  end
end
if ARGV[1] == '' and #ordered > 1 and not joined[first] then
  table.remove(ordered, 1)
end
local figures, reported, now = {}, {}, reported_ms()
local function report_to(list)
  return function(name, value)
    list[#list + 1], list[#list + 2] = name, value
  end
end
local stored, totals = report_task(report_to(figures)), put_totals()
local listed = #names > 0 and redis.call('EXISTS', stream) == 1
  and by_name(redis.call('XINFO', 'GROUPS', stream)) -- bound: consumer groups
local version, most = rules().version or '', math.max(2, math.floor(PAGE.observed_groups / #ordered))
for i, name in ipairs(ordered) do
  local own = {}
  if joined[name] then
    local leased = listed and listed[name] and listed[name].pending or 0
    report_group(report_to(own), name, leased, totals, now)
    reported[i] = {name, own, version, count_waiting(name, most), read_leased(name, leased, most),
      redis.call('HGETALL', key('staleness', name))} -- bound: stalenesses, 4 * (MOST_STALENESS + 1)
  else
    report_found(report_to(own), stored)
    reported[i] = {name, own, version, {'exact', stored, ''}, {'facts', 0}, {}}
  end
end
local workers = announced_since(ARGV[2], PAGE.observed_workers)
local memory = 0
for _, name in ipairs({stream, key('facts'), key('dead')}) do
  -- the user may lack the right
  local known, nbytes = pcall(redis.call, 'MEMORY', 'USAGE', name, 'SAMPLES', '5')
  memory = known and memory >= 0 and memory + (nbytes or 0) or -1
end
-- bound: settings and counters of the task
return {redis.call('HGETALL', task), number(puts, 'put'), string.format('%.0f', server_ms()), figures,
  reported, redis.call('ZCARD', key('workers')), workers, memory}
