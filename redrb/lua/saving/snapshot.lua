-- Read a task in order to save it. Writes nothing.
-- KEYS[1] stream
-- ARGV    'task': all but the entries
--         | 'entries', n, <n consumer groups>, seq ...: notes on entries that were read just before
-- Returns of 'task': {} if there is no task, else
--             {{field, value, ...} of the task, id of the last dead letter or '',
--              {consumer group, {field, value, ...}, leased, {staleness, groups, ...}}, ...}
--         of 'entries': {last id, then of each entry {facts or '', archived ms or '', then of each consumer
--              group that is not done with it: its place in ARGV, status it was moved to or '', rule it
--              expired by or '', failed deliveries, reads}}
--@include task counted settings groups ledger pending uncounted

if not exists() then
  return {}
end
local last = last_counted()
if ARGV[1] == 'task' then
  check_puts()
  local newest = redis.call('XREVRANGE', key('dead'), '+', '-', 'COUNT', 1)[1]
  local counters = task_fields()
  for _, name in ipairs(PUT_COUNTERS) do
    counters[#counters + 1], counters[#counters + 2] = name, string.format('%d', number(puts, name))
  end
  local found = {counters, newest and newest[1] or ''}
  for _, group in ipairs(groups()) do
    local state = {}
    for name, value in pairs(ledger_of(group)) do
      state[#state + 1], state[#state + 2] = name, string.format('%d', value)
    end
    found[#found + 1] = {group, state,
      -- bound: stalenesses, 4 * (MOST_STALENESS + 1)
      count_leased(group), redis.call('HGETALL', key('staleness', group))}
  end
  return found
end

local names = {}
for i = 1, tonumber(ARGV[2]) do -- bound: ARGV
  local group = ARGV[2 + i]
  names[i] = redis.call('SISMEMBER', key('groups'), group) == 1 and group
end
local found = {last}
for i = 3 + #names, #ARGV do
  local seq, member = ARGV[i], member_of(ARGV[i])
  local notes = {redis.call('HGET', key('facts'), member) or '',
    redis.call('ZSCORE', key('archive'), member) or ''}
  for at, group in ipairs(names) do
    if group and (waits_in(group, seq) or is_leased(group, seq)) then
      notes[#notes + 1] = at - 1
      notes[#notes + 1] = redis.call('HGET', key('moved', group), member) or ''
      notes[#notes + 1] = redis.call('HGET', key('expiries', group), member) or ''
      notes[#notes + 1] = tonumber(redis.call('HGET', key('deliveries', group), member) or '0')
      notes[#notes + 1] = tonumber(redis.call('HGET', key('reads', group), member) or '0')
    end
  end
  found[#found + 1] = notes
end
return found
