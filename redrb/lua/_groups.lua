-- What becomes of entries in the consumer groups.
--
-- In a consumer group an entry is waiting, leased (in the pending list) or done. It is deleted when
-- it is done in all. In a plain task what waits are the entries beyond the cursor, and those that
-- came back, in the sorted set ready:<group>; in an indexed one what is in the group's pools.
-- group:<group> holds cursor and counters.

-- Forget entries for good. Returns the number of those that were there.
local function delete(seqs)
  if #seqs == 0 then
    return 0
  end
  local sized, indexed = number(task, 'max_bytes') > 0, rules().indexed
  local deleted = 0
  for first = 1, #seqs, 1000 do
    local ids, fields, members = {}, {}, {}
    for i = first, math.min(first + 999, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
      fields[i - first + 1] = seqs[i]
      if indexed then
        members[i - first + 1] = member_of(seqs[i])
      end
    end
    deleted = deleted + redis.call('XDEL', stream, unpack(ids))
    if sized then
      local freed = 0
      for _, size in ipairs(redis.call('HMGET', key('sizes'), unpack(fields))) do
        freed = freed + tonumber(size or '0')
      end
      add(task, 'bytes', -freed)
      redis.call('HDEL', key('sizes'), unpack(fields))
    end
    if indexed then
      redis.call('HDEL', key('facts'), unpack(members))
    end
  end
  return deleted
end

local function is_leased(group, seq)
  local id = id_of(seq)
  return #redis.call('XPENDING', stream, group, id, id, 1) > 0
end

-- The pool in which an entry waits, or nil.
local function waits_in(group, seq)
  local member, pool = member_of(seq), group
  if rules().indexed then
    local facts = facts_of(member)
    pool = facts and home_of(group, member, facts) or group
  elseif tonumber(seq) > number(key('group', group), 'cursor') then
    return group
  end
  return redis.call('ZSCORE', key('ready', pool), member) and pool or nil
end

-- How long and how many of what is done stay as history; nil where the task keeps none.
local function keeps()
  local keep = redis.call('HMGET', task, 'keep_ms', 'keep_groups')
  return (keep[1] or keep[2]) and keep
end

-- Delete entries, or keep them to be read again where the task asks for it.
local function retire(seqs)
  local keep = keeps()
  if not keep then
    return delete(seqs)
  end
  local archive, now = key('archive'), now_ms()
  for _, seq in ipairs(seqs) do
    redis.call('ZADD', archive, now, member_of(seq))
  end
  local over = {}
  if keep[1] then
    over = redis.call('ZRANGEBYSCORE', archive, '-inf', now - keep[1], 'LIMIT', 0, 1000)
  end
  local excess = keep[2] and redis.call('ZCARD', archive) - keep[2] - #over or 0
  if excess > 0 then
    for _, member in ipairs(redis.call('ZRANGE', archive, #over, #over + excess - 1)) do
      over[#over + 1] = member
    end
  end
  in_parts('ZREM', archive, over)
  for i, member in ipairs(over) do
    over[i] = tonumber(member)
  end
  return delete(over)
end

-- Groups left without having been read. Where each is read once, they count as read: else a rate
-- would wait for reads that nobody can make.
local function left_unread(group, count)
  if rules().indexed and rules().max_reads == 1 then
    add(key('group', group), 'taken', count)
  end
end

-- Forget what this consumer group knew of entries that are done there, and the entries themselves
-- unless another group still needs them. `kept`: they may stay as history.
local function forget(group, seqs, kept)
  if rules().indexed
    and redis.call('EXISTS', key('moved', group), key('expiries', group), key('reads', group)) > 0 then
    for _, seq in ipairs(seqs) do
      redis.call('HDEL', key('moved', group), member_of(seq))
      redis.call('HDEL', key('expiries', group), member_of(seq))
      redis.call('HDEL', key('reads', group), member_of(seq))
    end
  end
  local all, over = groups(), seqs
  if #all ~= 1 or all[1] ~= group then
    over = {}
    for _, seq in ipairs(seqs) do
      local needed = false
      for _, other in ipairs(all) do
        if other ~= group and (waits_in(other, seq) or is_leased(other, seq)) then
          needed = true
          break
        end
      end
      if not needed then
        over[#over + 1] = seq
      end
    end
  end
  if kept and rules().indexed then
    return retire(over)
  end
  return delete(over)
end

-- Wake takes that wait: those of a full batch in a pool, and those with a condition, which look.
local function wake_pool(pool, now)
  if redis.call('EXISTS', key('queue', pool)) == 1 then
    local group = string.match(pool, '^[^:]+')
    local waiting
    if rules().indexed then
      waiting = math.min(redis.call('ZCARD', key('ready', pool)), reads_left(group))
    else
      waiting = number(key('group', group), 'waiting')
    end
    wake(pool, waiting, now)
  end
  if rules().indexed then
    wake(pool .. '?', math.huge, now)
  end
end

local function wake_pools(group, now)
  wake_pool(group, now)
  if rules().indexed then
    for _, status in ipairs(STATUSES) do
      if status ~= 'completed' then
        wake_pool(pool_of(group, status), now)
      end
    end
  end
end
