-- Count what waits in a status; the consumer group joins.
-- KEYS[1] stream
-- ARGV    group, status, where
-- Returns the number of entries; of those that are archived, the kept history too.
--@ _task _waiters _room _tags _plan _where _index _groups _membership

begin_writing()
local group, status, where = ARGV[1], ARGV[2], ARGV[3]
local pool = pool_of(group, status)
if not exists() then
  return 0
end
if not rules().indexed then
  if status ~= 'completed' then
    return 0
  end
  local waiting = redis.call('HGET', key('group', group), 'waiting')
  return waiting and tonumber(waiting) or redis.call('XLEN', stream)
end
join(group)
if where ~= '' then
  return count_where(pool, rules().names, cjson.decode(where))
end
local kept = status == 'archived' and redis.call('ZCARD', key('archive')) or 0
return redis.call('ZCARD', key('ready', pool)) + kept
