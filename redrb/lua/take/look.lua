-- Look how many groups a take of several partitions would find here, and queue for more; nothing is leased.
-- KEYS[1] stream
-- ARGV    group, waiter, need, most, ttl_ms, status, where, revision
--         need: the waiter is woken as soon as so many groups wait for it here; until then they are
--         reserved for it. most: how many groups it can use
--         ttl_ms: how long its place in the queue is kept, 0: leave the queue
--         status, where, revision: as for take/take
-- Returns {'found', groups that the waiter may take now, at most `most` with a query}
--       | {'gone'}: there is no such task, or its settings are others
--       | {'more'}: the consumer group is joining, or groups are being sorted: run it again
--         Repeated, it renews the place in the queue.
--@include task clock facts waiters waking queries

begin_writing()
local rule = rules()
if not rule.exists or rule.revision ~= ARGV[8] then
  return {'gone'}
end
local group, waiter, need, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local ttl_ms, status, where, now = tonumber(ARGV[5]), ARGV[6], ARGV[7], now_ms()
if redis.call('SISMEMBER', key('groups'), group) == 0 or redis.call('EXISTS', key('joining', group)) == 1 then
  --@include membership permissions
  check_permissions(stream)
  if not join(group) then
    return {'more'}
  end
end
if rule.unsorted then
  --@include sorting
  sort_groups()
  return {'more'}
end
local pool = pool_of(group, status)
local queue = queue_of(pool, where)
local free
if where == '' then
  free = redis.call('ZCARD', key('ready', pool))
  free = free - reserved_before(queue, waiter, now, free)
else
  --@include where
  free = #select_where(pool, rule.names, cjson.decode(where), most)
end
if ttl_ms > 0 then
  enqueue(queue, waiter, need, ttl_ms, now)
  if where ~= '' then
    enqueue_query(pool, where, free, ttl_ms)
  end
else
  dequeue(queue, waiter)
  if where ~= '' then
    leave_query(pool, where, 0)
  end
end
wake_pool(pool, now)
return {'found', math.max(free, 0)}
