-- Read what a task holds and who works on it, at one moment. Writes nothing. Its work does not depend on the
-- number of groups.
-- KEYS[1] stream
-- ARGV    name of the consumer group that is reported also if it has not joined
-- Returns {settings, groups put, server's ms, consumer groups, number of workers, workers}; {} if there is no
--         task:
--         settings: the hash of the task, as HGETALL returns it
--         consumer groups: {name, figures, waiting, leased, taken} of each, at most MOST_GROUPS:
--           figures: flat list of include/figures.lua
--           waiting, leased: {sampled, unknown, staleness, groups, ...}; sampled is 1 where only some of the
--             groups were read; a staleness above MOST_EXACT stands for a range: include/staleness_counts.lua
--           taken: staleness:<group>, as HGETALL returns it
--         workers: {name, server's ms of the last announcement, announcement} of each, at most MOST_WORKERS,
--           the newest first: include/announcements.lua
--@include task figures

local MOST_GROUPS = 16
local MOST_WORKERS = 200

if not exists() then
  return {}
end
--@include staleness_counts
local names = groups()
table.sort(names)
local first, ordered = ARGV[1], {ARGV[1]}
for _, name in ipairs(names) do
  if name ~= first and #ordered < MOST_GROUPS then
    ordered[#ordered + 1] = name
  end
end
if #ordered > 1 and redis.call('SISMEMBER', key('groups'), first) == 0 then
  table.remove(ordered, 1)
end
local reported = {}
for i, name in ipairs(ordered) do
  reported[i] = {name, figures_of(name), count_waiting(name), count_leased_staleness(name),
    redis.call('HGETALL', key('staleness', name))}
end
local workers = {}
local seen = redis.call('ZREVRANGE', key('workers'), 0, MOST_WORKERS - 1, 'WITHSCORES')
for i = 1, #seen, 2 do
  workers[#workers + 1] = {seen[i], seen[i + 1], redis.call('HGET', key('announcements'), seen[i]) or ''}
end
return {redis.call('HGETALL', task), number(puts, 'put'), string.format('%.0f', server_ms()), reported,
  redis.call('ZCARD', key('workers')), workers}
