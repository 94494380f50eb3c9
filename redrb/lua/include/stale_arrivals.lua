-- Groups that were too stale when they arrived: deleted, or kept and counted as expired.
--@include task

-- Delete the entries `discarded`, by seq, and note for each member of `notes` by which rule it expired.
local function drop_stale(discarded, notes)
  for _, seq in ipairs(discarded) do
    redis.call('XDEL', stream, id_of(seq))
  end
  for _, group in ipairs(groups()) do
    for member, note in pairs(notes) do
      redis.call('HSET', key('expiries', group), member, note)
    end
  end
end
