-- Candidates for eviction: functions that return one seq after another, nil at the end. A candidate may
-- turn out to be leased or deleted: the caller then passes false to the next call.
--@include task

-- The first stored entry beyond `seq`; reading it costs its bytes.
local function stored_after(seq, last)
  local entry = redis.call('XRANGE', stream, '(' .. id_of(seq), '+', 'COUNT', 1)[1]
  return entry and seq_of(entry[1]) or last + 1
end

-- Candidates by arrival. Entries below `floor`, which the task keeps, are deleted,
-- history or leased, and are not looked at again; the sorted set behind holds those that were requeued
-- since, by arrival. After LOOKS looks, or MOST_LEASED leased groups, the rest is left to the next call:
-- `unseen` is set.
local LOOKS = 1000
local MOST_LEASED = 50
local unseen = false
local function oldest_candidates(last)
  local found, at, looks, leased, window = {}, 0, 0, 0, 4
  local next_seq = number(task, 'floor')
  if next_seq == 0 then
    next_seq = stored_after(0, last)
  end
  local function look()
    local members, first = {}, next_seq
    next_seq = math.min(first + window, last + 1)
    for seq = first, next_seq - 1 do
      members[#members + 1] = member_of(seq)
    end
    local facts = redis.call('HMGET', key('facts'), unpack(members))
    local kept = redis.call('ZMSCORE', key('archive'), unpack(members))
    local stored = false
    found, at = {}, 0
    for i = 1, #members do
      stored = stored or facts[i]
      if facts[i] and not kept[i] then
        found[#found + 1] = first + i - 1
      end
    end
    if not stored and window > 100 then -- a wide gap
      next_seq = stored_after(next_seq - 1, last)
    end
    looks, window = looks + #members, math.min(window * 2, 128)
  end
  return function(gone)
    looks, leased = looks + 1, leased + (gone == false and 1 or 0)
    unseen = looks >= LOOKS or leased >= MOST_LEASED
    if unseen then
      return nil
    end
    local behind = redis.call('ZRANGE', key('behind'), 0, 0, 'WITHSCORES')
    if behind[1] and tonumber(behind[2]) < (found[at + 1] or next_seq) then
      redis.call('ZREM', key('behind'), behind[1])
      return tonumber(behind[1])
    end
    while at == #found and next_seq <= last and looks < LOOKS do
      look()
    end
    at = at + 1
    local seq = found[at]
    unseen = not seq and next_seq <= last
    redis.call('HSET', task, 'floor', string.format('%.0f', (seq or next_seq - 1) + 1))
    return seq
  end
end

-- Candidates from a sorted set: by ZRANGE the first ones, by ZREVRANGE the last ones. After MOST_LEASED
-- candidates that another consumer group leases, those by arrival follow.
local function sorted_candidates(name, command)
  local rank = 0
  return function(gone)
    rank = rank + (gone == false and 1 or 0)
    local member = rank < MOST_LEASED and redis.call(command, name, rank, rank)[1]
    return member and tonumber(member)
  end
end
