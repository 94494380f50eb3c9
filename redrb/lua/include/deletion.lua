-- Deletes entries that no consumer group needs any more.
--@include task facts

-- Bytes of entries as max_bytes counts them: of those put since the task has that setting.
local function bytes_of(seqs)
  local bytes, since, members = 0, number(task, 'sized_after'), {}
  for _, seq in ipairs(seqs) do
    if tonumber(seq) > since then
      members[#members + 1] = member_of(seq)
    end
  end
  for _, facts in ipairs(facts_of_all(members)) do
    bytes = bytes + (facts and facts.size or 0)
  end
  return bytes
end

-- Delete entries. Returns the number of entries that existed.
local function delete(seqs)
  local deleted = 0
  if rules().max_bytes > 0 then
    add(task, 'bytes', -bytes_of(seqs))
  end
  for first = 1, #seqs, PAGE.arguments do
    local ids, members = {}, {}
    for i = first, math.min(first + PAGE.arguments - 1, #seqs) do
      ids[i - first + 1] = id_of(seqs[i])
      members[i - first + 1] = member_of(seqs[i])
    end
    deleted = deleted + redis.call('XDEL', stream, unpack(ids))
    redis.call('HDEL', key('facts'), unpack(members))
    if redis.call('EXISTS', key('behind'), key('buried')) > 0 then
      redis.call('ZREM', key('behind'), unpack(members))
      redis.call('ZREM', key('buried'), unpack(members))
    end
  end
  return deleted
end
